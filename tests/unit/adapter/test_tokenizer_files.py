"""Tokenizers of folders with tokenizer.json: its steps decide the ids, whatever class the configuration names."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from sie_adapter.loading.tokenizer import FILE, PROBES, load_tokenizer, read_tokenizer
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.entries import LoadOptions

SPECIALS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
CORPUS = [*PROBES, "the quick brown fox 2026 jumps over 13 lazy dogs in Zürich", "Hello WORLD hello world don't"] * 3


def _save(folder: Path, tokenizer: Tokenizer, config: dict[str, Any], kind: str = "bert") -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / FILE))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def _trained(normalizer: Any, pre_tokenizer: Any, model: Any, trainer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.train_from_iterator([*CORPUS, "202 650 841 823"], trainer)
    return tokenizer


def _digits_by_threes() -> Tokenizer:
    """Return a byte-level BPE that splits digits by threes, as Llama 3 does."""
    steps = [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+|\s+"), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIALS, show_progress=False)
    return _trained(None, pre_tokenizers.Sequence(steps), models.BPE(), trainer)


def _compatibility_forms() -> Tokenizer:
    """Return a WordPiece that folds compatibility forms, which the normalizer of BERT does not."""
    steps = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIALS, show_progress=False)
    return _trained(steps, pre_tokenizers.BertPreTokenizer(), models.WordPiece(unk_token="[UNK]"), trainer)


@pytest.mark.parametrize(
    ("kind", "named", "make"),
    [
        ("gpt2", "GPT2TokenizerFast", _digits_by_threes),
        ("qwen2", "Qwen2TokenizerFast", _digits_by_threes),
        ("cohere", "CohereTokenizerFast", _digits_by_threes),
        ("bert", "BertTokenizerFast", _compatibility_forms),
    ],
)
def test_load_tokenizer_keeps_steps_that_the_class_lacks(kind: str, named: str, make: Any, tmp_path: Path) -> None:
    stored = make()
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    folder = _save(tmp_path, stored, {"tokenizer_class": named, **roles}, kind)
    text = "2026 and 650841823 in Ｚürich ﬁne"
    assert load_tokenizer(folder, LoadOptions()).encode(text).ids == stored.encode(text).ids
    assert read_tokenizer(folder)(text)["input_ids"] == stored.encode(text).ids


@pytest.mark.parametrize(
    ("named", "stated", "expected"),
    [
        ("RobertaTokenizer", {"add_prefix_space": True}, True),
        ("RobertaTokenizer", {}, False),
        ("PreTrainedTokenizerFast", {"add_prefix_space": True}, False),  # this class documents no such setting
        ("RobertaTokenizer", {"add_bos_token": True, "do_lower_case": True}, False),
    ],
)
def test_load_tokenizer_adds_a_prefix_space_only_as_documented(
    named: str, stated: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    step = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=step.alphabet(), show_progress=False
    )
    stored = _trained(None, step, models.BPE(), trainer)
    folder = _save(tmp_path, stored, {"tokenizer_class": named, **stated}, "roberta")
    step.add_prefix_space = expected
    stored.pre_tokenizer = step
    assert load_tokenizer(folder, LoadOptions()).encode("Hello world").ids == stored.encode("Hello world").ids


def test_load_tokenizer_adds_tokens_of_the_configuration(tmp_path: Path) -> None:
    stored = _compatibility_forms()
    size = stored.get_vocab_size()
    config = {"tokenizer_class": "BertTokenizer", "unk_token": "[UNK]", "extra_special_tokens": ["<ent>"]}
    folder = _save(tmp_path, stored, config)
    assert size in load_tokenizer(folder, LoadOptions()).encode("fox <ent> fox").ids


def test_read_tokenizer_refuses_a_class_that_adds_other_tokens_and_shows_the_probe(tmp_path: Path) -> None:
    config = {"tokenizer_class": "NllbTokenizer", "unk_token": "[UNK]"}
    stored = _compatibility_forms()
    stored.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[("[CLS]", 2)]
    )
    folder = _save(tmp_path, stored, config)
    with pytest.raises(ModelLoadFailed) as refused:
        read_tokenizer(folder)
    assert PROBES[0] in str(refused.value)
