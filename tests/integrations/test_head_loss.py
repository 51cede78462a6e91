"""Head and cross-entropy without materialized logits in the models of Hugging Face."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from accuracy import hold_to_policy
from stepscope.acceleration.forward_registry import add_layer
from stepscope.acceleration.pieces import deferred_logits
from stepscope.acceleration.pieces.deferred_logits import DeferredLogits
from stepscope.acceleration.pieces.head_loss import find
from stepscope.kernels.weight_copies import WeightCopies

VOCAB = 131
BATCHES = 8
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**GROUPED, "tie_word_embeddings": True},
    "Mistral": {**GROUPED, "sliding_window": None},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED,
    "Gemma": GROUPED,
    "GPTNeoX": SMALL,
    "Phi": SMALL,
    "GPT2": {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma2": (GROUPED, "soft-capping"),
    "Cohere": (GROUPED, "scaled"),
    "Granite": ({**GROUPED, "logits_scaling": 8.0}, "scaled"),
}


def model(family: str, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    end = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    made = getattr(transformers, f"{family}{end}")(
        getattr(transformers, f"{family}Config")(**config)
    )
    return made.to(dtype).train()


def replaced(one: Any, copies: WeightCopies | None = None, owners: int = 1) -> Any:
    """Replace the head and the modules around it, each of which may compute the loss."""
    replacements, left = find(one, copies)
    assert not left
    assert len(replacements) == 1 + owners
    for replacement in replacements:
        add_layer(replacement.module, replacement.forward, None)
    return one


def batch(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (2, 12), generator=generator)
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def results(one: Any, **more: Any) -> dict[str, Tensor]:
    """Return the losses of several batches, since the error of a single number is a matter of luck,
    and the gradients of their sum."""
    losses = [one(**batch(seed), **more).loss for seed in range(BATCHES)]
    torch.stack(losses).sum().backward()
    gradients = {f"d {name}": parameter.grad for name, parameter in one.named_parameters()}
    return {"losses": torch.stack(losses).detach(), **gradients}


def exact_results(one: Any, items: Any) -> dict[str, Tensor]:
    """Return the results of a float64 model; its own loss would round the logits to float32."""
    losses = []
    for seed in range(BATCHES):
        tokens, labels = batch(seed).values()
        logits = one(tokens).logits[:, :-1].flatten(0, 1)
        rest = {"reduction": "mean" if items is None else "sum"}
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), **rest)
        losses.append(loss if items is None else loss / items)
    torch.stack(losses).sum().backward()
    gradients = {f"d {name}": parameter.grad for name, parameter in one.named_parameters()}
    return {"losses": torch.stack(losses).detach(), **gradients}


@pytest.fixture(autouse=True)
def fused_losses(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    losses: list[Tensor] = []
    function = deferred_logits.linear_cross_entropy

    def noted(*arguments: Any, **options: Any) -> Tensor:
        losses.append(function(*arguments, **options))
        return losses[-1]

    monkeypatch.setattr(deferred_logits, "linear_cross_entropy", noted)
    return losses


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("items", [None, 17, torch.tensor(17)], ids=["mean", "int", "tensor"])
def test_loss_and_gradients_hold_to_the_policy(
    family: str, items: Any, fused_losses: list[Tensor]
) -> None:
    config = MODELS[family]
    more = {} if items is None else {"num_items_in_batch": items}
    ours = results(replaced(model(family, config), WeightCopies()), **more)
    assert len(fused_losses) == BATCHES
    exact = exact_results(model(family, config, torch.float64), items)
    hold_to_policy(exact, results(model(family, config), **more), ours)


@pytest.mark.parametrize("family", LEFT)
def test_transformed_logits_are_left_alone(family: str) -> None:
    config, reason = LEFT[family]
    replacements, (left,) = find(model(family, config), None)
    assert not replacements
    assert left.name == "lm_head"
    assert reason in left.reason


@pytest.mark.parametrize("family", ["Gemma2", "Granite"])
def test_transformed_logits_would_be_materialized(
    family: str, monkeypatch: pytest.MonkeyPatch, fused_losses: list[Tensor]
) -> None:
    """Even if the option that transforms them were not known."""
    monkeypatch.setattr("stepscope.acceleration.pieces.head_loss._TRANSFORMED", {})
    ours, theirs = (
        results(replaced(model(family, LEFT[family][0]))),
        results(model(family, LEFT[family][0])),
    )
    assert not fused_losses
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def pickled(outputs: Any) -> Any:
    detached = type(outputs)(loss=outputs.loss.detach(), logits=outputs.logits.detach())
    return pickle.loads(pickle.dumps(detached))


class TestOutput:
    def outputs(self, **more: Any) -> tuple[Any, Any]:
        config = MODELS["Llama"]
        ours = replaced(model("Llama", config))(**batch(), **more)
        return ours, model("Llama", config)(**batch(), **more)

    def test_fields(self) -> None:
        ours, theirs = self.outputs(output_hidden_states=True, use_cache=True)
        assert isinstance(ours, type(theirs))
        assert type(ours).__name__ == type(theirs).__name__
        assert list(ours.keys()) == list(theirs.keys())
        torch.testing.assert_close(ours[0], theirs[0])
        assert ours.get("loss") is ours.loss is ours["loss"]
        assert type(ours.past_key_values) is type(theirs.past_key_values)
        for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            assert torch.equal(one, other)
        # None of this has computed the logits.
        assert isinstance(dict(ours.items())["logits"], DeferredLogits)

    @pytest.mark.parametrize(
        "read",
        [
            lambda out: out.logits,
            lambda out: out["logits"],
            lambda out: out[1],
            lambda out: out[:2][1],
            lambda out: out.to_tuple()[1],
            lambda out: out.get("logits"),
            lambda out: pickled(out).logits,
            lambda out: torch.clone(dict(out.items())["logits"]),
        ],
    )  # fmt: skip
    def test_reading_the_logits_computes_them(self, read: Any) -> None:
        ours, theirs = self.outputs()
        logits = read(ours)
        assert isinstance(logits, Tensor)
        assert torch.equal(logits, theirs.logits)
        if ours.logits.grad_fn is not None:
            assert ours["logits"] is ours.logits

    def test_a_tuple(self) -> None:
        ours, theirs = self.outputs(return_dict=False, use_cache=False)
        assert isinstance(ours, tuple)
        loss, logits = ours
        torch.testing.assert_close(loss, theirs[0])
        assert torch.equal(logits + 0, theirs[1])

    def test_logits_to_keep(self) -> None:
        """The original raises too: there are fewer logits than labels."""
        for one in (replaced(model("Llama", MODELS["Llama"])), model("Llama", MODELS["Llama"])):
            assert one(batch()["input_ids"], logits_to_keep=2).logits.shape == (2, 2, VOCAB)
            with pytest.raises(ValueError, match="batch_size"):
                one(**batch(), logits_to_keep=2)


def test_evaluation_generation_and_undo(fused_losses: list[Tensor]) -> None:
    ours, theirs = replaced(model("Llama", MODELS["Llama"])), model("Llama", MODELS["Llama"])
    tokens = batch()["input_ids"]
    for one in (ours, theirs):
        one.eval()
    assert torch.equal(ours(**batch()).logits, theirs(**batch()).logits)
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(ours.generate(tokens, **how), theirs.generate(tokens, **how))
    ours.train()
    assert type(ours(tokens).logits) is Tensor
    assert not fused_losses
    del ours.forward, ours.lm_head.forward
    assert type(ours(**batch())) is type(theirs(**batch()))
    assert not fused_losses


def test_another_loss_function(fused_losses: list[Tensor]) -> None:
    def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(
            logits.view(-1, vocab_size), labels.view(-1), label_smoothing=0.1
        )

    ours, theirs = replaced(model("Llama", MODELS["Llama"])), model("Llama", MODELS["Llama"])
    for one in (ours, theirs):
        one.loss_function = smoothed
    assert torch.equal(results(ours)["losses"], results(theirs)["losses"])
    assert not fused_losses


def test_adapters(fused_losses: list[Tensor]) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(*targets: str) -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM")
        return get_peft_model(model("Llama", GROUPED), config)

    ours, theirs = adapted("q_proj"), adapted("q_proj")
    ours = replaced(ours, owners=3)
    for one in (ours, theirs):
        one(**batch()).loss.backward()
    assert len(fused_losses) == 1
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None, name
        else:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    replacements, (left,) = find(adapted("q_proj", "lm_head"), None)
    assert not replacements
    assert left.name == "base_model.model.lm_head"


def test_mapping_over_the_output_as_accelerate_does() -> None:
    from accelerate.utils import convert_outputs_to_fp32

    one = replaced(model("Llama", MODELS["Llama"]))
    outputs = convert_outputs_to_fp32(one)(**batch())
    assert isinstance(dict(outputs.items())["logits"], DeferredLogits)
    expected = model("Llama", MODELS["Llama"])(**batch())
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert torch.equal(outputs.logits, expected.logits)


def test_a_copy_is_independent() -> None:
    one = replaced(model("Llama", MODELS["Llama"]))
    other = copy.deepcopy(one)
    results(other)
    assert all(parameter.grad is None for parameter in one.parameters())
