"""Tokenizers of folders with tokenizer.json: its steps decide the ids, whatever class the configuration names."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from sie_adapter.loading.tokenizer import FILE, PROBES, load_tokenizer, read_tokenizer
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.entries import LoadOptions
from sie_sidecar.prepare.rows import ModelTokenizer

DRAWS = 500
SPECIALS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
CLASSES = sorted({name for name in TOKENIZER_MAPPING_NAMES.values() if name})
CORPUS = [*PROBES, "the quick brown fox 2026 jumps over 13 lazy dogs in Zürich", "Hello WORLD hello world don't"] * 3


def _normalizer(rng: random.Random) -> Any:
    steps = [
        normalizers.NFC(),
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.Lowercase(),
        normalizers.StripAccents(),
        normalizers.Strip(),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Replace("ü", "ue"),
        normalizers.Prepend("▁"),
        normalizers.BertNormalizer(
            clean_text=rng.random() < 0.5,
            handle_chinese_chars=rng.random() < 0.5,
            strip_accents=rng.choice([None, True, False]),
            lowercase=rng.random() < 0.5,
        ),
    ]
    chosen = rng.sample(steps, rng.choice([0, 1, 1, 2, 3]))
    if len(chosen) < 2:
        return chosen[0] if chosen else None
    return normalizers.Sequence(chosen)


def _pre_tokenizer(rng: random.Random) -> Any:
    steps = [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.BertPreTokenizer(),
        pre_tokenizers.Punctuation(),
        pre_tokenizers.UnicodeScripts(),
        pre_tokenizers.Digits(individual_digits=rng.random() < 0.5),
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+"), "removed", invert=True),
    ]
    last = [
        pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.5, use_regex=rng.random() < 0.5),
        pre_tokenizers.Metaspace(prepend_scheme=rng.choice(["always", "first", "never"]), split=rng.random() < 0.5),
    ]
    chosen = [*rng.sample(steps, rng.choice([0, 0, 1, 2])), *rng.sample(last, rng.choice([0, 1, 1]))]
    if len(chosen) < 2:
        return chosen[0] if chosen else None
    return pre_tokenizers.Sequence(chosen)


def _post_processor(rng: random.Random) -> Any:
    numbers = list(zip(SPECIALS, range(len(SPECIALS)), strict=True))
    return rng.choice(
        [
            None,
            processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
            processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2), trim_offsets=rng.random() < 0.5),
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=numbers
            ),
            processors.TemplateProcessing(single="$A [SEP]", pair="$A [SEP] $B [SEP]", special_tokens=numbers),
        ]
    )


def _tokenizer(rng: random.Random) -> Tokenizer:
    """Return a trained tokenizer of random steps, with a few added tokens of random properties."""
    size = rng.choice([300, 500])
    trainer: Any
    match rng.choice(["bpe", "wordpiece", "wordlevel", "unigram"]):
        case "bpe":
            tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", byte_fallback=rng.random() < 0.3))
            trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIALS, show_progress=False)
        case "wordpiece":
            tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
            trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIALS, show_progress=False)
        case "wordlevel":
            tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
            trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=SPECIALS, show_progress=False)
        case _:
            tokenizer = Tokenizer(models.Unigram())
            trainer = trainers.UnigramTrainer(
                vocab_size=size, special_tokens=SPECIALS, unk_token="[UNK]", show_progress=False
            )
    tokenizer.normalizer, tokenizer.pre_tokenizer = _normalizer(rng), _pre_tokenizer(rng)
    # Unigram refuses a corpus with more characters than tokens
    lines = [
        line for line in CORPUS if isinstance(trainer, trainers.BpeTrainer) or all(ord(sign) < 0x250 for sign in line)
    ]
    tokenizer.train_from_iterator(rng.sample(lines, min(60, len(lines))), trainer)
    tokenizer.post_processor = _post_processor(rng)
    for content in rng.sample(["<ent>", "Zürich", "fox", "<|user|>"], rng.choice([0, 0, 1, 2])):
        flags = {name: rng.random() < 0.3 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokenizer.add_tokens([AddedToken(content, **flags)])
    if rng.random() < 0.3:
        tokenizer.enable_truncation(8, direction=rng.choice(["left", "right"]))
    if rng.random() < 0.3:
        tokenizer.enable_padding(length=16, pad_id=1, pad_token="[PAD]")
    return tokenizer


def _configuration(rng: random.Random) -> dict[str, Any]:
    roles = dict(zip(["unk_token", "pad_token", "cls_token", "sep_token", "mask_token"], SPECIALS, strict=True))
    config: dict[str, Any] = {role: token for role, token in roles.items() if rng.random() < 0.8}
    if rng.random() < 0.9:
        config["tokenizer_class"] = rng.choice(CLASSES) + rng.choice(["", "Fast"])
    for name in ("do_lower_case", "strip_accents", "add_prefix_space", "add_bos_token", "add_eos_token", "legacy"):
        if rng.random() < 0.25:
            config[name] = rng.random() < 0.5
    if rng.random() < 0.2:
        config["extra_special_tokens"] = ["<new>"]
    if rng.random() < 0.3:
        config["truncation_side"] = rng.choice(["left", "right"])
    return config


def _texts(rng: random.Random) -> list[str]:
    pieces = ["Zürich", "2026", " ", "  ", "HELLO", "naïve", "fox", "<ent>", "[MASK]", "東京", "don't", "½", "\t", "a1"]
    return [*PROBES, *("".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(20))]


def _outcome(folder: Path, rng: random.Random, stored: Tokenizer, config: dict[str, Any]) -> str:
    """Return "equal" or the code of the refusal; fail for a tokenizer that reads a text otherwise than its file."""
    try:
        whole = read_tokenizer(folder)
        bare = load_tokenizer(folder, LoadOptions())
    except ModelLoadFailed as error:
        return error.code
    step = stored.pre_tokenizer
    if isinstance(step, pre_tokenizers.ByteLevel) and "add_prefix_space" in config:
        step.add_prefix_space = whole._tokenizer.pre_tokenizer.add_prefix_space
    stored.no_truncation()
    stored.no_padding()
    served = ModelTokenizer(bare.to_str().encode(), 10_000)
    texts = [text for text in _texts(rng) if "<new>" not in text]
    expected = [stored.encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokens.ids.tolist() for tokens in served.tokenise(texts, 10_000, "NONE")] == expected
    assert [list(whole(text, add_special_tokens=False)["input_ids"]) for text in texts] == expected
    assert [bare.encode(text).ids for text in texts] == [stored.encode(text).ids for text in texts]
    assert bare.encode("a", "fox").ids == stored.encode("a", "fox").ids
    return "equal"


def _save(folder: Path, tokenizer: Tokenizer, config: dict[str, Any], kind: str = "bert") -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / FILE))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def test_load_tokenizer_reads_as_its_file_for_every_class_or_refuses(tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    outcomes: Counter[str] = Counter()
    kinds = ["bert", "roberta", "xlm-roberta", "llama", "gpt2", "t5", "modernbert", "deberta-v2", "mpnet"]
    for seed in range(DRAWS):
        rng = random.Random(seed)
        tokenizer, config = _tokenizer(rng), _configuration(rng)
        folder = _save(tmp_path / str(seed), tokenizer, config, rng.choice(kinds))
        outcomes[_outcome(folder, rng, tokenizer, config)] += 1
    assert outcomes.total() == DRAWS
    assert outcomes["equal"] > 0.8 * DRAWS, outcomes


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
