"""What the scripts that train the bundled models share: one training loop and one way to save."""

import json
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"


def byte_level_tokenizer(
    texts: list[str], vocab_size: int, context: int, single_digits: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text has ids. With `single_digits` no token holds two digits, as in
    Llama's tokenizer.
    """
    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Split(Regex(r" ?\d"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if single_digits else byte_level
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=EOS,
        eos_token=EOS,
        unk_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def optimizers(model: torch.nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the blocks, AdamW on embeddings, norms, biases and heads."""
    matrices = [
        p
        for n, p in model.named_parameters()
        if p.ndim == 2 and any(block in n for block in (".h.", ".layer.", ".layers."))
    ]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def fit(
    model, batches, loss_of, steps: int, lr: float, weight_decay: float, minutes: float, decay: float = 0.4
) -> dict:
    """Warm up, hold, then decay linearly to zero over the last share `decay` of the steps; `minutes`
    shortens the schedule if the machine is slow.
    """
    opts, start, log = optimizers(model, lr, weight_decay), time.time(), []
    for step in range(steps):
        progress = max(step / steps, (time.time() - start) / (60 * minutes))
        if progress >= 1:
            break
        scale = min(1.0, (step + 1) / 100, (1 - progress) / max(decay, 1e-9))
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = lr * scale
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
            loss = loss_of(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        log.append(loss.item())
        if step % 50 == 0:
            mean = sum(log[-50:]) / len(log[-50:])
            print(
                f"step {step:5d}  loss {mean:.4f}  progress {progress:.3f}  {time.time() - start:.0f} s",
                flush=True,
            )
    return {"steps": len(log), "minutes": round((time.time() - start) / 60, 1)}


def save(model, tokenizer, folder: Path, info: dict, options: dict) -> None:
    """Weights in float16, tokenizer, and training.json: what was reached, and with which options."""
    info = info | {"options": {name: value for name, value in options.items() if name != "out"}}
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(info, indent=1) + "\n")
    print(json.dumps(info))
