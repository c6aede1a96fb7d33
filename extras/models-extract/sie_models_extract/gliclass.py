"""GLiClass, by the package `gliclass`: scores for the classes of a request. One prompt contains the labels and the
text.

    text, labels ──► the package's prompt ──► ids; only the text may be truncated ──► padded passes ──► softmax or
    sigmoid

The prompt may also have an instruction and `examples`, which are texts with their labels. Models with `instruct` in
their names were trained with instructions and examples. A score depends on all labels and their order. Scores are a
softmax over the labels of a request; with `multi_label`, the score of a label is the sigmoid of its own logit.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions, Result, labels_refused
from sie_adapter.loading.checkpoint import construction, for_inference
from sie_adapter.loading.tokenizer import bare_tokenizer, read_tokenizer
from sie_contracts.errors import InvalidInput
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_models_extract.extraction import (
    Extractor,
    bound_length,
    check_encoder,
    classified,
    padding_of,
    refuse_misfits,
    tokenizer_fault,
)

_CHARACTERS_PER_TOKEN = 8  # estimated characters per token, for the first cut of a long text before it is tokenised


@dataclass(frozen=True)
class GliclassTexts:
    """Tokenised texts. `results`: for each text an error or an empty result; a pass replaces the empty results of its
    texts. `passes`: for each pass the indices of its texts, and their padded ids. `padding`: number of positions
    without a token.
    """

    results: list[Result]
    passes: list[tuple[list[int], Any]]
    padding: int


@dataclass(frozen=True)
class _Around:
    """Instruction and examples of a prompt. `examples`: maps with `text` and `labels`."""

    examples: tuple[dict[str, Any], ...]
    instruction: str

    def texts(self) -> list[str]:
        return [text for example in self.examples for text in (example["text"], *example["labels"])]


class GliclassModel(Extractor[GliclassTexts]):
    """Loaded GLiClass of the uni-encoder kind. `extract` may run on several threads at once.

    A result is `{"classifications": [{label, score}]}`, best first: all labels whose score reaches the threshold
    (default 0). A text of white space has no classifications. The result is an InvalidInput if the labels cannot be
    used, or if the text, the instruction or an example contains a token that separates the parts of the prompt. It is
    an InferenceFailed if the scores are not finite.

    `tokenizer`: tokenizer.json of the backbone. `max_tokens`: limit of the whole prompt; longer texts are cut.
    """

    pass_tokens = 512, 16384

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        encoder = _from_files(folder, entry, entry.load, {"device_map": "meta"}).model.encoder_model
        return tokenizer_fault(bare_tokenizer(read_tokenizer(folder)), encoder)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        from gliclass.pipeline import UniEncoderZeroShotClassificationPipeline

        options = {"attn_implementation": "eager"} if compute.backend == "eager" else {}
        self._model = for_inference(_from_files(folder, entry, load, options), compute)
        self._tokenizer = read_tokenizer(folder)
        encoder = self._model.model.encoder_model
        self.max_tokens = min(entry.max_tokens, bound_length(self._tokenizer, encoder, entry.max_tokens))
        self._pipeline = UniEncoderZeroShotClassificationPipeline(
            self._model, self._tokenizer, max_length=self.max_tokens, device=compute.device, progress_bar=False
        )
        self._describe(self._model, encoder, self._tokenizer, compute)
        # a fast tokenizer raises if a thread calls it while another thread changes its padding or truncation
        self._tokenizing = threading.Lock()

    def _make(self, texts: Sequence[str], options: ExtractOptions) -> GliclassTexts:
        labels = list(options.labels)
        around = _Around(tuple(options.parameters.get("examples", ())), options.instruction)
        self._check_prompt(labels, around)
        results: list[Result] = [{"classifications": []} for _ in texts]
        places: list[int] = []
        for index, text in enumerate(texts):
            if self._reserved(text):
                results[index] = InvalidInput(
                    "text: it contains a token that the model reserves for labels", reason="reserved_token"
                )
            elif text.strip():
                places.append(index)
        rows = self._encoded([texts[index] for index in places], labels, around)
        lengths = [len(row) for row in rows]
        chosen = self._passes(lengths, options)
        padded = [([places[index] for index in part], self._padded([rows[index] for index in part])) for part in chosen]
        return GliclassTexts(results, padded, padding_of(lengths, chosen))

    def _extract(self, texts: Sequence[str], options: ExtractOptions, prepared: GliclassTexts) -> list[Result]:
        labels, results = list(options.labels), list(prepared.results)
        for places, batch in prepared.passes:
            for index, scores in zip(places, self._logits(batch, labels), strict=True):
                results[index] = classified(scores, labels, options)
        return results

    def _passes(self, lengths: Sequence[int], options: ExtractOptions) -> list[list[int]]:
        """Return the texts of each pass, as indices. The texts of a pass have equal lengths, because the package's
        pooling includes padding. Lengths may differ only with the pooling `first`, which reads no padding.
        """
        chosen = super()._passes(lengths, options)
        if self._model.config.pooling_strategy == "first":
            return chosen
        return [
            [row for row in part if lengths[row] == length]
            for part in chosen
            for length in sorted({lengths[row] for row in part})
        ]

    def _check_prompt(self, labels: list[str], around: _Around) -> None:
        """Raise InvalidInput if a part of the prompt cannot be used, or if the prompt leaves too few tokens for the
        text (`_check_room`).
        """
        if not labels:
            raise labels_refused("expected at least one")
        limit = self._pipeline._resolve_max_num_classes(labels, True) or self._model.config.max_num_classes
        if len(labels) > limit:
            raise labels_refused(f"got {len(labels)}, expected at most {limit}")
        if any(self._reserved(label) for label in labels):
            raise labels_refused("a label contains a token that the model reserves")
        for name, text in (("instruction", around.instruction), *(("examples", text) for text in around.texts())):
            if self._reserved(text):
                raise InvalidInput.at(name, "it contains a token that the model reserves", reason="reserved_token")
        self._check_room(len(self._counter.encode(self._prompt("", labels, around)).ids))

    def _reserved(self, text: str) -> bool:
        pipeline = self._pipeline
        return any(token in text for token in (pipeline.label_token, pipeline.sep_token, pipeline.example_token))

    def _prompt(self, text: str, labels: list[str], around: _Around) -> str:
        prompt: str = self._pipeline.prepare_input(text, labels, list(around.examples), around.instruction)
        return prompt

    def _encoded(self, texts: list[str], labels: list[str], around: _Around) -> list[list[int]]:
        """Return the ids of each text with its labels, at most `max_tokens`. If labels or examples follow the text in
        the prompt, this method truncates the text, because the package would truncate the labels or examples.
        """
        if not texts:
            return []
        texts = [self._head(text) for text in texts]
        if around.examples or not self._model.config.prompt_first:
            texts = [self._cut(text, labels, around) for text in texts]
        inputs = [self._prompt(text, labels, around) for text in texts]
        with self._tokenizing:
            rows: list[list[int]] = self._tokenizer(inputs, truncation=True, max_length=self.max_tokens)["input_ids"]
        return rows

    def _cut(self, text: str, labels: list[str], around: _Around) -> str:
        """Cut a text whose prompt has more tokens than the model reads. The tokens are counted inside the prompt,
        because an instruction directly before the text changes the tokens of the text's first word.
        """
        offsets = self._counter.encode(self._prompt(text, labels, around)).offsets
        beyond = len(offsets) - self.max_tokens
        if beyond <= 0:
            return text
        begin = len(self._prompt("", labels, replace(around, examples=()))) if self._model.config.prompt_first else 0
        own = [(start, end) for start, end in offsets if begin <= start < end <= begin + len(text)]
        # one more token is cut, because white space at the new end of the text may be a token
        head, tail = own[: -1 - beyond], own[-1 - beyond :]
        # a character may have several tokens: keep the character only if all of its tokens stay
        return text[: min(head[-1][1], tail[0][0]) - begin] if head else ""

    def _head(self, text: str) -> str:
        """Cut a very long text at a space, after more tokens than the model reads. The rest is then never tokenised."""
        length = _CHARACTERS_PER_TOKEN * self.max_tokens
        while length < len(text):
            stop = text.rfind(" ", 0, length)
            if stop > 0 and len(self._counter.encode(text[:stop], add_special_tokens=False).ids) > self.max_tokens:
                return text[:stop]
            length *= 4
        return text

    def _padded(self, rows: list[list[int]]) -> Any:
        with self._tokenizing:
            return self._tokenizer.pad({"input_ids": rows}, padding="longest", return_tensors="pt")

    def _logits(self, padded: Any, labels: list[str]) -> Tensor:
        """Run one pass, and return its logits, float32 [rows, labels], on the host."""
        batch = padded.to(self._device)
        classes = self._pipeline._resolve_max_num_classes(labels, True)
        output = self._model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_num_classes=classes
        )
        logits: Tensor = output.logits[:, : len(labels)].float().cpu()
        return logits


def _from_files(folder: Path, entry: ModelEntry, load: LoadOptions, options: dict[str, Any]) -> Any:
    from gliclass import GLiClassModel, GLiClassModelConfig

    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if (kind := raw.get("architecture_type", "uni-encoder")) != "uni-encoder":
        raise incompatible(f"{entry.id} is a GLiClass {kind}, the family gliclass supports only the uni-encoder")
    if raw.get("squeeze_layers"):
        raise incompatible(f"{entry.id} sums the states of all layers (squeeze_layers), which its package cannot run")
    encoder = raw.get("encoder_config") or {}
    check_encoder(encoder, entry, load)
    raw["encoder_model"] = str(folder)  # the package looks for a PEFT adapter of the encoder in the folder of this name
    with construction():
        model, report = GLiClassModel.from_pretrained(
            folder,
            config=GLiClassModelConfig(**raw),
            dtype=torch.float32,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        refuse_misfits(entry, fault.replace("_keys", ""), map(str, report[fault]))
    return model
