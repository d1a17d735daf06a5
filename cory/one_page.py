"""PPO and CORY (arXiv:2410.06101, algorithm 1) on one page: what the package computes, a response at a time.

s0         a query: the opening of a film review, or a word problem; the task turns it into a prompt
pi         the policy: pi(a_t | s_t) is an LLM's probability of the next token a_t after the text so far, s_t
a1, a2     the responses of two LLMs: the pioneer, which is shown s0, and the observer, shown s0 and a1
r(s0, a)   the task's reward: how positive the review is; 1 if the answer is correct, else 0
pi0        the pretrained LLM. Each agent's policy starts as a copy of it; pi0 itself is never trained
KL, eta    KL(pi || pi0): how far pi is from pi0 after the same text, in nats; eta is what a nat costs
V(s_t)     the critic: w h + b, where h is the last layer's hidden state at s_t; predicts the rewards to come

Agents learn to choose more often the tokens that earned more than V had predicted. Without the lines marked
CORY this is PPO. Names end in shapes: B responses, T tokens of one, V possible tokens, H entries of h.
"""
import copy
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from cory.config import Gsm8kConfig, ImdbConfig, import_name, parse
from cory.errors import exit_on_user_error
from cory.loading import load_language_model


def train(cfg):
    """Algorithm 1. Yields after each update: iteration, role, agent, its responses and its metrics."""
    pi0 = load_language_model(cfg.model, cfg, torch.device("cpu"))
    task_class = cfg.resolve("task")
    task = task_class(cfg, task_class.load_data(cfg), pi0)
    pioneer = Agent("llm1", 0, pi0, cfg)
    observer = Agent("llm2", 1, pi0, cfg) if cfg.method == "cory" else None                     # CORY
    for iteration in range(1, cfg.iterations + 1):
        # --- agents respond to queries, and the task rewards them ---
        queries, max_tokens = task.batch(iteration)
        prompts = task.pioneer_prompts(queries)
        a1 = pioneer.respond(prompts, max_tokens)               # a1 ~ pi(. | s0)
        r1_B = task.reward(queries, [a.text for a in a1])       # r(s0, a1)
        score1_B = r1_B                                         # what it is trained on
        if observer:                                                                            # CORY
            if cfg.knowledge_transfer:                          # CORY: otherwise it is shown s0 alone
                prompts = task.observer_prompts(queries, [a.text for a in a1])                  # CORY
            a2 = observer.respond(prompts, max_tokens)          # CORY: a2 ~ pi(. | s0, a1)
            r2_B = task.reward(queries, [a.text for a in a2])   # CORY: r(s0, a2)
            score1_B = r1_B + cfg.partner_reward * r2_B         # CORY: both are trained on
            score2_B = r2_B + cfg.partner_reward * r1_B         # CORY: r(s0, a1) + r(s0, a2)
        # --- each agent learns from its own responses, by PPO ---
        metrics = {"task_reward": r1_B.mean().item()}
        metrics |= pioneer.update(a1, score1_B)
        yield iteration, "pioneer", pioneer, a1, metrics
        if observer:                                                                            # CORY
            metrics = {"task_reward": r2_B.mean().item()}                                       # CORY
            metrics |= observer.update(a2, score2_B)                                            # CORY
            yield iteration, "observer", observer, a2, metrics                                  # CORY
        # --- agents exchange roles; each keeps its weights, V, Adam and eta ---                # CORY
        every = cfg.role_exchange_every                         # CORY: T_REx; 0: never
        if observer and every and iteration % every == 0:                                       # CORY
            pioneer, observer = observer, pioneer                                               # CORY


@dataclass
class Response:
    """A sampled response; pi_old and V_old are pi and V as they were then."""
    text: str
    prompt: list[int]           # token ids
    tokens: list[int]           # token ids a_t of the response
    old_logp_T: Tensor          # log pi_old(a_t | s_t)
    old_value_T: Tensor         # V_old(s_t)
    kl_T: Tensor                # KL(pi_old || pi0) in s_t


class Agent:
    """An LLM and its critic, with their optimizer and eta, whichever role it plays."""
    def __init__(self, name, index, pi0, cfg):
        self.name = name
        self.index = index
        self.cfg = cfg
        self.base = pi0
        self.pi = copy.deepcopy(pi0.lm).requires_grad_()
        self.w_H = torch.zeros(pi0.head.in_features, requires_grad=True)
        self.b = torch.zeros(1, requires_grad=True)
        policy = {"params": self.pi.parameters(), "lr": cfg.learning_rate}
        critic_rate = cfg.critic_learning_rate or cfg.learning_rate
        critic = {"params": [self.w_H, self.b], "lr": critic_rate}
        self.adam = torch.optim.Adam([policy, critic])
        schedule = cfg.resolve("lr_schedule")
        self.schedule = LambdaLR(self.adam, lambda done: schedule(done / cfg.iterations))
        self.eta = cfg.init_kl_coef
        self.rng_count = 0

    def generator(self):
        """A new random generator for each rollout and each update."""
        self.rng_count += 1
        return np.random.default_rng((self.cfg.seed, self.index, self.rng_count))

    def forward(self, lm, prompt, tokens):
        """In each state s_t of a response: lm's log-probabilities of all tokens and of a_t, and its h."""
        output = lm(torch.tensor([prompt + tokens]), output_hidden_states=True)
        states = slice(len(prompt) - 1, -1)         # the positions after which a token was chosen
        logits_TV = output.logits[0, states] / self.cfg.temperature
        logp_TV = logits_TV.log_softmax(-1)
        logp_T = logp_TV[range(len(tokens)), tokens]
        hidden_TH = output.hidden_states[-1][0, states]
        return logp_TV, logp_T, hidden_TH

    def respond(self, prompts, max_tokens):
        """A response to each prompt."""
        uniform_TB = self.generator().random((max_tokens, len(prompts)))
        return [self.sample(prompt, uniform_TB[:, b]) for b, prompt in enumerate(prompts)]

    @torch.no_grad()
    def sample(self, prompt_text, uniform_T):
        """A response to one prompt, drawn with a uniform random number for each token."""
        prompt = self.base.encode([prompt_text])[0]
        tokens = []
        for uniform in uniform_T:
            logits_V = self.pi(torch.tensor([prompt + tokens])).logits[0, -1]
            p_V = (logits_V / self.cfg.temperature).softmax(-1)
            cumulative_V = p_V.cumsum(0, dtype=torch.float64)
            # inverse transform: the first token whose cumulative probability exceeds the uniform number
            token = int((cumulative_V <= uniform * cumulative_V[-1]).sum())
            tokens.append(token)
            if token in self.base.end_ids:
                break
        before, whole = self.base.tokenizer.batch_decode(
            [prompt, prompt + tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text = whole[len(before):]
        logp_TV, logp_T, hidden_TH = self.forward(self.pi, prompt, tokens)
        logp0_TV, logp0_T, _ = self.forward(self.base.lm, prompt, tokens)
        value_T = hidden_TH @ self.w_H + self.b
        kl_T = logp_T - logp0_T                                     # k1, an estimate from a_t alone
        if self.cfg.kl_penalty == "full":
            kl_T = (logp_TV.exp() * (logp_TV - logp0_TV)).sum(-1)   # exact, the same for all a_t
        return Response(text, prompt, tokens, logp_T, value_T, kl_T)

    def update(self, responses, score_B):
        """PPO: advantages, Adam steps on shuffled mini-batches, and the next eta. Returns metrics."""
        cfg = self.cfg
        rng = self.generator()
        advantages, returns = [], []
        for response, score in zip(responses, score_B.tolist(), strict=True):
            advantage_T = self.gae(response, score)
            advantages.append(advantage_T)
            returns.append(advantage_T + response.old_value_T)      # what V learns
        # mean 0 and variance 1 over all tokens of all responses
        all_advantages = torch.cat(advantages)
        mean = all_advantages.mean()
        std = (all_advantages.var(correction=0) + 1e-8).sqrt()
        whitened = [(advantage_T - mean) / std for advantage_T in advantages]
        policy_losses, value_losses = [], []
        for _ in range(cfg.num_ppo_epochs):
            order = rng.permutation(len(responses))
            for rows in order.reshape(-1, cfg.mini_batch_size * cfg.gradient_accumulation_steps):
                n_tokens = sum(len(responses[b].tokens) for b in rows)
                for b in rows:
                    policy_loss_T, value_loss_T = self.losses(responses[b], whitened[b], returns[b])
                    loss_T = policy_loss_T + cfg.vf_coef * value_loss_T
                    (loss_T.sum() / n_tokens).backward()            # adds to the mini-batch's gradient
                    policy_losses += policy_loss_T.tolist()
                    value_losses += value_loss_T.tolist()
                self.adam.step()
                self.adam.zero_grad()
        self.schedule.step()
        kl = np.mean([response.kl_T.sum().item() for response in responses])
        metrics = {"score": score_B.mean().item(), "kl": kl, "kl_coef": self.eta}
        metrics["policy_loss"] = np.mean(policy_losses)
        metrics["value_loss"] = np.mean(value_losses)
        if cfg.kl_target:                                           # eta keeps the KL near its target
            error = np.clip(kl / cfg.kl_target - 1, -0.2, 0.2)
            self.eta *= 1 + error * len(responses) / cfg.kl_horizon
        return metrics

    def gae(self, response, score):
        """GAE (eq. 12): A_t = delta_t + gamma lam A_{t+1}, of TD errors delta_t = r_t + gamma V_{t+1} - V_t.
        After the last token V and A are 0, whether the response ended or was cut.
        """
        gamma = self.cfg.gamma
        lam = self.cfg.lam
        value_T = response.old_value_T
        reward_T = -self.eta * response.kl_T                        # eq. 2: r_t = -eta KL_t,
        reward_T[-1] += score                                       # and the score at the end
        next_value_T = torch.cat([value_T[1:], torch.zeros(1)])
        delta_T = reward_T + gamma * next_value_T - value_T
        advantage_T = delta_T.clone()
        for t in reversed(range(len(delta_T) - 1)):
            advantage_T[t] += gamma * lam * advantage_T[t + 1]
        return advantage_T

    def losses(self, response, advantage_T, return_T):
        """PPO's losses of each token: of pi (eq. 11) and of V (eq. 10 and 13)."""
        eps = self.cfg.cliprange
        eps_value = self.cfg.cliprange_value
        _, logp_T, hidden_TH = self.forward(self.pi, response.prompt, response.tokens)
        ratio_T = (logp_T - response.old_logp_T).exp()              # pi / pi_old
        clipped_ratio_T = ratio_T.clamp(1 - eps, 1 + eps)
        objective_T = torch.min(ratio_T * advantage_T, clipped_ratio_T * advantage_T)
        value_T = hidden_TH @ self.w_H + self.b
        old_value_T = response.old_value_T
        change_T = (value_T - old_value_T).clamp(-eps_value, eps_value)
        error_T = value_T - return_T
        clipped_error_T = old_value_T + change_T - return_T
        value_loss_T = 0.5 * torch.max(error_T ** 2, clipped_error_T ** 2)
        return -objective_T, value_loss_T


# --- the command line ---
CONFIGS = {"imdb": ImdbConfig, "gsm8k": Gsm8kConfig}
SMALL = dict(iterations=6, batch_size=8, mini_batch_size=4, learning_rate=1e-4)     # a minute on two cores
FIXED = dict(                                                                       # not varied here
    device="cpu", dtype="float32", shard=False, lora_rank=0, share_weights=False,
    advantage="gae", critic="linear", loss="ppo", loss_mean="tokens", max_grad_norm=0,
    kl_in="reward", kl_controller="adaptive", sampler="cory", chat_template=False, save_every=0,
    wandb="disabled")


def main(argv):
    task = "gsm8k" if "gsm8k" in argv else "imdb"
    fixed = FIXED | {"task": task, "method": "ppo" if "ppo" in argv else "cory"}
    tiny = import_name(f"train_{task}:PRESETS")["tiny"]
    cfg = parse(CONFIGS[task], {"tiny": tiny | SMALL | fixed}, argv)
    for name, value in fixed.items():                   # which a flag may have changed
        hint = f"the page has only {value}; train_{task}.py has more"
        cfg.require(name, getattr(cfg, name) == value, hint)
    for iteration, role, agent, responses, metrics in train(cfg):
        print(f"\n{iteration} {role} {agent.name}: {responses[0].text!r}")
        print(", ".join(f"{name.replace('_', ' ')} {x:.3g}" for name, x in metrics.items()))


if __name__ == "__main__":
    exit_on_user_error(main)(sys.argv[1:])
