"""PPO and CORY on GSM8K: `python train_gsm8k.py --method cory`; `--help` lists every setting."""
from cory.config import BUNDLED, TINY, Gsm8kConfig, parse
from cory.errors import exit_on_user_error

# The paper's table 2, with its learning rate for PPO. The paper states neither the length of responses nor
# that the base, which is in 4 bits, is trained with LoRA.
LLAMA2 = dict(model="meta-llama/Llama-2-7b-chat-hf", dataset="openai/gsm8k", min_response_length=0,
              max_response_length=256, batch_size=32, mini_batch_size=2, gradient_accumulation_steps=16,
              learning_rate=1e-5, init_kl_coef=0.01, lora_rank=16, load_in_4bit=True, dtype="bfloat16")

# A pretrained model; its settings were not tuned. Eta and learning rate are those of the paper's CORY.
QWEN = TINY | dict(model="Qwen/Qwen2.5-Coder-0.5B-Instruct", dataset="openai/gsm8k", one_shot=False,
                   chat_template=True, max_response_length=300, iterations=50, batch_size=32,
                   mini_batch_size=8, dtype="bfloat16", learning_rate=1e-4, init_kl_coef=0.01, lam=1.0,
                   eval_queries=64, eval_every=10)

# `--preset NAME` changes these settings of Gsm8kConfig; the first is the default.
PRESETS = {
    "tiny": TINY | dict(model=f"{BUNDLED}gsm8k/lm", dataset=f"{BUNDLED}gsm8k/problems", one_shot=False,
                        max_response_length=48, learning_rate=1.2e-3, critic_learning_rate=1e-3, lam=1.0,
                        init_kl_coef=0.02, iterations=40, eval_every=10),
    "qwen": QWEN,
    # For any chat model: add its --model and, if its template does not read this, --chat_template_kwargs {}.
    "chat": QWEN | dict(model="Qwen/Qwen3-0.6B", max_response_length=512, checker="final_answer",
                        chat_template_kwargs='{"enable_thinking": false}',
                        system_prompt="Reason step by step, and put the final number in \\boxed{}."),
    "llama2-7b": LLAMA2,
    "llama2-7b-lr1e-4": LLAMA2 | dict(learning_rate=1e-4),          # the paper's learning rate for CORY
}


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    cfg = parse(Gsm8kConfig, PRESETS, argv)
    # imported only now, so that a mistyped flag is answered before PyTorch is loaded
    from cory.train import train

    train(cfg)


if __name__ == "__main__":
    main()
