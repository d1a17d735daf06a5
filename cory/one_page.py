"""PPO and CORY (arXiv:2410.06101, algorithm 1) on one page: what the package computes, a response at a time.

s0         a query: the opening of a film review, or a word problem, of which the task makes a prompt
pi         the policy: an LLM, as the probability of each possible next token a_t after the text so far, s_t
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
from collections import defaultdict
from itertools import count
from types import SimpleNamespace

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from cory.config import Gsm8kConfig, ImdbConfig, import_name, parse
from cory.errors import exit_on_user_error
from cory.loading import load_language_model

SMALL = dict(iterations=6, batch_size=8, mini_batch_size=4, learning_rate=1e-4)     # a minute on two cores
FIXED = dict(device="cpu", dtype="float32", lora_rank=0, chat_template=False, shard=False, advantage="gae",
             critic="linear", loss="ppo", loss_mean="tokens", kl_in="reward", kl_controller="adaptive",
             max_grad_norm=0, share_weights=False, save_every=0, wandb="disabled")      # not varied here


def train(cfg):
    """Algorithm 1. Yields after each update: iteration, role, agent, its responses and its metrics."""
    pi0 = load_language_model(cfg.model, cfg, torch.device("cpu"))
    task_class = cfg.find("task")
    task = task_class(cfg, task_class.load_data(cfg), pi0)
    pioneer = Agent("llm1", (cfg.seed, 0), pi0, cfg)
    observer = Agent("llm2", (cfg.seed, 1), pi0, cfg) if cfg.method == "cory" else None         # CORY
    for iteration in range(1, cfg.iterations + 1):
        # --- agents respond to queries, and the task rewards them ---
        queries, limit = task.batch(iteration)
        a1 = [*pioneer.respond(task.pioneer_prompts(queries), limit)]           # a1 ~ pi(. | s0)
        r1_B = score1_B = task.reward(queries, [a.text for a in a1])
        if observer:                                                            # CORY: knowledge transfer
            shown = task.observer_prompts(queries, [a.text for a in a1])                        # CORY
            prompts = shown if cfg.knowledge_transfer else task.pioneer_prompts(queries)        # CORY
            a2 = [*observer.respond(prompts, limit)]                            # CORY: a2 ~ pi(. | s0, a1)
            r2_B = task.reward(queries, [a.text for a in a2])                                   # CORY
            score1_B = r1_B + cfg.partner_reward * r2_B                         # CORY: both are trained on
            score2_B = r2_B + cfg.partner_reward * r1_B                         # CORY: r(s0, a1) + r(s0, a2)
        # --- each agent learns from its own responses, by PPO ---
        yield iteration, "pioneer", pioneer, a1, pioneer.update(a1, r1_B, score1_B)
        if observer:                                                                            # CORY
            yield iteration, "observer", observer, a2, observer.update(a2, r2_B, score2_B)      # CORY
        if observer and cfg.role_exchange_every and iteration % cfg.role_exchange_every == 0:   # CORY
            pioneer, observer = observer, pioneer               # CORY: each keeps weights, V, Adam and eta


class Agent:
    """An LLM and its critic, with their optimizer and eta, whichever role it plays."""
    def __init__(self, name, seed, pi0, cfg):
        self.name, self.pi0, self.cfg, self.eta = name, pi0, cfg, cfg.init_kl_coef
        self.generators = (np.random.default_rng((*seed, n)) for n in count(1))     # for rollouts and updates
        self.pi = copy.deepcopy(pi0.lm).requires_grad_()
        self.w_H, self.b = (torch.zeros(n, requires_grad=True) for n in (pi0.head.in_features, 1))
        of_critic = {"params": [self.w_H, self.b], "lr": cfg.critic_learning_rate or cfg.learning_rate}
        self.adam = torch.optim.Adam([{"params": self.pi.parameters()}, of_critic], lr=cfg.learning_rate)
        self.schedule = LambdaLR(self.adam, lambda done: cfg.find("lr_schedule")(done / cfg.iterations))

    def states(self, lm, a):
        """By lm in each state s_t of a response: log-probabilities of all tokens and of a_t; and h."""
        out = lm(torch.tensor([a.prompt + a.tokens]), output_hidden_states=True)
        at = slice(len(a.prompt) - 1, -1)               # from the prompt's last token to the last but one
        logp_TV = (out.logits[0, at] / self.cfg.temperature).log_softmax(-1)
        return logp_TV, logp_TV[range(len(a.tokens)), a.tokens], out.hidden_states[-1][0, at]

    @torch.no_grad()
    def respond(self, prompts, limit):
        """Yields a response to each prompt, with what the update needs of this pi: log pi_old, KL, V_old."""
        uniform_TB, tokenizer = next(self.generators).random((limit, len(prompts))), self.pi0.tokenizer
        for b, prompt in enumerate(prompts):
            a = SimpleNamespace(prompt=self.pi0.encode([prompt])[0], tokens=[])
            while len(a.tokens) < limit and not self.pi0.end_ids.intersection(a.tokens):
                # inverse transform: the first token whose cumulative probability exceeds a uniform number
                logits_V = self.pi(torch.tensor([a.prompt + a.tokens])).logits[0, -1] / self.cfg.temperature
                cumulative_V = logits_V.softmax(-1).cumsum(0, dtype=torch.float64)
                a.tokens.append(int((cumulative_V <= uniform_TB[len(a.tokens), b] * cumulative_V[-1]).sum()))
            before, whole = tokenizer.batch_decode([a.prompt, a.prompt + a.tokens], skip_special_tokens=True,
                                                   clean_up_tokenization_spaces=False)
            a.text = whole[len(before):]
            logp_TV, a.old_logp_T, hidden_TH = self.states(self.pi, a)
            a.old_value_T = hidden_TH @ self.w_H + self.b
            logp0_TV, logp0_T, _ = self.states(self.pi0.lm, a)
            full_T = (logp_TV.exp() * (logp_TV - logp0_TV)).sum(-1)         # exact, the same for all a_t
            a.kl_T = full_T if self.cfg.kl_penalty == "full" else a.old_logp_T - logp0_T
            yield a

    def update(self, responses, reward_B, score_B):
        """Token rewards, advantages, PPO's losses on shuffled mini-batches; then eta. Returns metrics."""
        cfg, rng, eps, eps_V = self.cfg, next(self.generators), self.cfg.cliprange, self.cfg.cliprange_value
        log = defaultdict(list, task_reward=reward_B.tolist(), score=score_B.tolist(), kl_coef=[self.eta])
        for a, score in zip(responses, score_B.tolist(), strict=True):
            a.reward_T = -self.eta * a.kl_T                                         # eq. 2: -eta KL_t,
            a.reward_T[-1] += score                                                 # and the score at the end
            next_value_T = torch.cat([a.old_value_T[1:], torch.zeros(1)])           # 0 at the end, cut or not
            a.advantage_T = a.reward_T + cfg.gamma * next_value_T - a.old_value_T
            for t in reversed(range(len(a.tokens) - 1)):                            # eq. 12: GAE, backwards
                a.advantage_T[t] += cfg.gamma * cfg.lam * a.advantage_T[t + 1]
            a.return_T = a.advantage_T + a.old_value_T                                  # what V learns
        advantages = torch.cat([a.advantage_T for a in responses])          # to be whitened together
        mean, std = advantages.mean(), (advantages.var(correction=0) + 1e-8).sqrt()
        epochs = [rng.permutation(len(responses)) for _ in range(cfg.num_ppo_epochs)]
        for rows in np.concatenate(epochs).reshape(-1, cfg.mini_batch_size * cfg.gradient_accumulation_steps):
            tokens = sum(len(responses[b].tokens) for b in rows)
            for a in [responses[b] for b in rows]:
                _, logp_T, hidden_TH = self.states(self.pi, a)
                ratio_T = (logp_T - a.old_logp_T).exp()                                     # pi / pi_old
                white_T = (a.advantage_T - mean) / std
                objective_T, clipped_T = ratio_T * white_T, ratio_T.clamp(1 - eps, 1 + eps) * white_T
                policy_loss_T = -torch.min(objective_T, clipped_T)                          # eq. 11
                value_T = hidden_TH @ self.w_H + self.b
                near_T = a.old_value_T + (value_T - a.old_value_T).clamp(-eps_V, eps_V)     # eq. 10 and 13
                value_loss_T = 0.5 * torch.max((value_T - a.return_T) ** 2, (near_T - a.return_T) ** 2)
                ((policy_loss_T + cfg.vf_coef * value_loss_T).sum() / tokens).backward()
                log["policy_loss"] += policy_loss_T.tolist()
                log["value_loss"] += value_loss_T.tolist()
            self.adam.step()
            self.adam.zero_grad()
        self.schedule.step()
        kl = np.mean([a.kl_T.sum().item() for a in responses])
        kl_error = min(max(kl / cfg.kl_target - 1, -0.2), 0.2) if cfg.kl_target else 0.0
        self.eta *= 1 + kl_error * len(responses) / cfg.kl_horizon                  # keeps KL near its target
        return {"kl": kl} | {name: np.mean(values) for name, values in log.items()}


def main(argv):
    task, config_class = ("gsm8k", Gsm8kConfig) if "gsm8k" in argv else ("imdb", ImdbConfig)
    only = FIXED | {"task": task, "method": "ppo" if "ppo" in argv else "cory"}
    cfg = parse(config_class, {"tiny": import_name(f"train_{task}:PRESETS")["tiny"] | SMALL | only}, argv)
    for name, value in only.items():
        cfg.require(name, getattr(cfg, name) == value, f"the page has only {value}; train_{task}.py has more")
    for iteration, role, agent, responses, metrics in train(cfg):
        print(f"\n{iteration} {role} {agent.name}: {responses[0].text!r}")
        print(", ".join(f"{name.replace('_', ' ')} {x:.3g}" for name, x in metrics.items()))


if __name__ == "__main__":
    exit_on_user_error(main)(sys.argv[1:])
