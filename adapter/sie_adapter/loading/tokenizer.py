"""Load of a model's tokenizer from its folder, and checks that the tokenizer fits the model's weights and heads.

    folder ──► check that files exist ──► transformers' tokenizer, with the backend of tokenizer.json ──► probes
    ──► bare tokenizer ──► fitted to the table of embeddings ──► fault: reason why it cannot belong to the model

A model with a wrong tokenizer, or without one, still returns plausible answers: transformers creates an empty tokenizer
if a folder has no tokenizer files, and assigns new ids to special tokens that are missing in the files.

Where a folder has tokenizer.json, its normalizer, pre-tokenizer, model and post-processor decide the ids, because the
model was trained with them. transformers 5 builds a tokenizer from the steps of the class that a configuration
names, and drops all others without a message. What other files may add:

    tokens of roles (cls_token, ..), extra_special_tokens,   added if tokenizer.json lacks them
    added_tokens_decoder, added_tokens.json
    add_prefix_space                                         set in a byte-level pre-tokenizer if documented
    model_max_length                                         limit of the length (`tokenizer_limit`)
    truncation_side, padding_side                            replace the directions in tokenizer.json
    model_input_names, of the configuration or the class     without token_type_ids, all types are 0
    do_lower_case in sentence_bert_config.json               texts are lower-cased before all steps
    tokenizer_class, do_lower_case, strip_accents,           not read
    add_bos_token, add_eos_token, all others

The code of a folder (`trust_remote_code`) may build another tokenizer; it is refused if it reads a probe differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sie_adapter.loading.modules import Modules, TransformerSettings
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models import families
from sie_contracts.models.entries import LoadOptions
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_store.folder_files import read_json

# names of the vocabulary files in published model folders
FILE = "tokenizer.json"
_FILES = (FILE, "vocab.txt", "vocab.json", "*.model")
_REMEDY = "copy tokenizer.json and tokenizer_config.json from the repository that the weights come from"
# a tokenizer can read a sentence if it turns more than this fraction of the characters into tokens other than the
# unknown token and special tokens
_KNOWN = 0.5
_MAX_SPECIAL_PROBES = 16
_SHOWN = 60  # largest number of characters of a probe in a message
_UNKNOWN_SIGN = "\U00010600"  # a Linear A character, which is in no vocabulary
# sentences in several scripts, and notations for models of programs, proteins or molecules; the right tokenizer of any
# model can read at least one of these samples
SAMPLES = {
    "Latin": "the river runs past the old town and into the sea",
    "Vietnamese": "dòng sông chảy qua thành phố cổ",
    "Cyrillic": "река течёт мимо старого города к морю",
    "Greek": "το ποτάμι περνά από την παλιά πόλη",
    "Arabic": "النهر يجري بجانب المدينة القديمة",
    "Hebrew": "הנהר זורם ליד העיר העתיקה",
    "Devanagari": "नदी पुराने शहर के पास बहती है",
    "Bengali": "নদী পুরানো শহরের পাশ দিয়ে বয়ে যায়",
    "Tamil": "நதி பழைய நகரத்தைக் கடந்து ஓடுகிறது",
    "Telugu": "నది పాత పట్టణం గుండా ప్రవహిస్తుంది",
    "Thai": "แม่น้ำไหลผ่านเมืองเก่าลงสู่ทะเล",
    "Georgian": "მდინარე ძველ ქალაქს ჩაუდის",
    "Armenian": "գետը հոսում է հին քաղաքի մոտով",
    "Amharic": "ወንዙ በአሮጌው ከተማ በኩል ይፈሳል",
    "Chinese": "河流经过古城流向大海",
    "Japanese": "川は古い町のそばを流れて海に入る",
    "Korean": "강은 오래된 도시를 지나 바다로 흐른다",
    "program": "def area(width, height): return width * height",
    "DNA": "ACGTTGCAACGTGGATTACAGCAT",
    "protein": "M K T A Y I A K Q R Q I S F V K S H F S R Q",
    "protein in one word": "MKTAYIAKQRQISFVKSHFSRQ",
    "SMILES": "CC(=O)OC1=CC=CC=C1C(=O)O",
}
# texts that tell steps of tokenizers apart: accents in both forms, capitals, digits, blanks, marks, control characters
PROBES = (
    *SAMPLES.values(),
    "Zürich Ångström naïve CAFÉ",
    "Zu\u0308rich A\u030angstro\u0308m nai\u0308ve CAFE\u0301",
    "ΐ ΰ \u03b9\u0308\u0301 Ὦ ΣΊΣΥΦΟΣ ς",
    "İstanbul ISPARTA ığdır i̇",
    "Straße STRASSE ẞ ß",
    "ﬁne ﬂow ①② Ⅳ ½ ㎏ ㍿",
    "ＦＵＬＬ ｗｉｄｔｈ ０１２３ ｶﾞｷﾞ",
    "iPhone McDonald XMLHttpRequest snake_case kebab-case",
    "A a AA aA",
    "0 1 12 123 1234 12345 123456789",
    "650841823 and 2026-11-30, 3.14159 or 1,000,000.5",
    "٠١٢٣ ۰۱۲۳ ०१२३ ๑๒๓",
    "x2 2x v1.2.3 H2O 4th",
    "one  two   three    four",
    " leading and trailing ",
    "\ttab\tand\t\ttabs",
    "line\nline\n\nline\r\nline",
    "no\u00a0break\u2003em\u3000wide\u2009thin",
    "zero\u200bwidth\u200cnon\u200djoiner\ufeffmark soft\u00adhyphen",
    "bell\u0007null\u0001esc\u001b[0m del\u007f next\u0085",
    "replacement \ufffd private \ue000",
    "don't can't I'm we'll they've O'Neill 'quoted'",
    "“curly” ‘single’ «guillemets» „low“",
    "dash - – — ― minus − underscore _ tilde ~",
    "(a) [b] {c} <d> </d> a/b a\\b a|b",
    "what?! ... … !!! ??? ¿qué? ¡ya!",
    "50% €100 $5 £3 ¥7 #tag @name a&b a+b=c^d",
    "me@example.org https://example.org/a?b=c&d=e#f",
    "😀 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ☃️ ☃",
    "漢字かな交じり文。カタカナ、ひらがな",
    "中文，全角标点。「引号」",
    "ภาษาไทยไม่มีช่องว่าง",
    "한국어 조사 \u1112\u1161\u11ab\u1100\u116e\u11a8",
    "العَرَبِيَّة الإسلام ﷲ لآ",
    "שָׁלוֹם עֲלֵיכֶם",
    "हिन्दी में क्षत्रिय",
    "Tiếng Việt ở Tie\u0302\u0301ng",
    "Ёлка й \u0438\u0306 ъ",
    "antidisestablishmentarianism " + "a" * 120,
    "",
)


class TokenNeeds(NamedTuple):
    """Tokens that a model needs before and between its texts. `begins`: a special token before each text; the model
    reads the state of this token. `separates`: a special token between the texts of a pair.
    """

    begins: bool = False
    separates: bool = False

    @classmethod
    def for_family(cls, family: str, pooling: str, *, is_decoder: bool) -> TokenNeeds:
        """Return the needs of a family. `pooling`: the pooling of its vectors. A decoder reads a pair as one text, so a
        decoder needs no separator. A decoder needs a first token only for the pooling "cls".
        """
        row = families.row(family)
        return cls(
            begins="cls" in pooling.split("+") or (row.reads_first_token and not is_decoder),
            separates=row.separates_pairs and not is_decoder,
        )


UNLIMITED = 1 << 24  # a model_max_length from this number on means no limit: transformers writes 10^30
_NO_NEEDS = TokenNeeds()
_NO_SETTINGS = TransformerSettings()


def read_tokenizer(folder: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the transformers tokenizer of `folder`, which takes its ids from tokenizer.json if there is one;
    `options` replace settings of its files. Raises ModelLoadFailed: NOT_FOUND if the folder has no tokenizer,
    INCOMPATIBLE if the tokenizer cannot be read, CERTIFICATE if it reads a probe otherwise than tokenizer.json.
    """
    if not any(any(folder.glob(name)) for name in _FILES):
        raise load_failed("NOT_FOUND", f"{folder} has no tokenizer (none of {', '.join(_FILES)}): {_REMEDY}")
    try:
        tokenizer = _of_class(folder, trust_remote_code, options)
        take_file(tokenizer, folder, **options)
    except ModelLoadFailed:
        raise
    except Exception as error:  # transformers documents no narrower exception for a tokenizer that cannot be read
        cause = f"the tokenizer of {folder} cannot be read ({type(error).__name__}: {error})"
        raise incompatible(f"{cause}: {_REMEDY}") from error
    return tokenizer


def _of_class(folder: Path, trust_remote_code: bool, options: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, **options
        )
    except ImportError:  # the class splits words by a package; tokenizer.json has no such step
        raise
    except Exception:  # a class of another kind of model cannot be built from this file
        if trust_remote_code or not (folder / FILE).is_file():
            raise
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **options)


def take_file(tokenizer: Any, folder: Path, **options: Any) -> None:
    """Give the transformers tokenizer of `folder` the backend of tokenizer.json, if there is one, with what other files
    may add. Raises ModelLoadFailed CERTIFICATE if the tokenizer then reads a probe otherwise than tokenizer.json.
    """
    if not (folder / FILE).is_file():
        return
    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise incompatible(f"{kind.__name__} has no fast tokenizer")
    is_library = kind.__module__.startswith("transformers.")
    if kind is not PreTrainedTokenizerFast and is_library:
        generic = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **options)
        tokenizer._tokenizer = generic._tokenizer
    _set_prefix_space(tokenizer, folder, options)
    # code of the folder may add special tokens to a text
    _check_probes(
        folder, lambda text: list(tokenizer(text, add_special_tokens=is_library)["input_ids"]), tokenizer, is_library
    )


def _set_prefix_space(tokenizer: Any, folder: Path, options: dict[str, Any]) -> None:
    config = {**read_json(folder / "tokenizer_config.json"), **options}
    stated = config.get("add_prefix_space")
    step = tokenizer._tokenizer.pre_tokenizer
    documented = "add_prefix_space" in signature(type(tokenizer).__init__).parameters
    if documented and isinstance(stated, bool) and isinstance(step, pre_tokenizers.ByteLevel):
        step.add_prefix_space = stated


def _check_probes(
    folder: Path, read: Callable[[str], list[int]], tokenizer: Any, special: bool, *, lowercases: bool = False
) -> None:
    """Raise ModelLoadFailed CERTIFICATE if `read` gives a probe other ids than tokenizer.json does, with `special` also
    for the special tokens around it. Probes are PROBES, and texts with special tokens of tokenizer.json. A probe with a
    token that other files add is left out.
    """
    stored = Tokenizer.from_file(str(folder / FILE))
    _refuse_invented(folder, stored)  # without its unknown token, a WordPiece model fails on a probe
    stored.no_truncation()
    stored.no_padding()
    step = stored.pre_tokenizer
    if isinstance(step, pre_tokenizers.ByteLevel):
        step.add_prefix_space = tokenizer._tokenizer.pre_tokenizer.add_prefix_space
    if lowercases:
        stored = with_normalizers(stored, [normalizers.Lowercase()])
    vocabulary = stored.get_vocab(with_added_tokens=True)
    extra = [token for token in tokenizer.get_added_vocab() if token not in vocabulary]
    tokens = sorted(token.content for token in stored.get_added_tokens_decoder().values() if token.special)
    for text in (*PROBES, *(f"a {token} b{token}" for token in tokens[:_MAX_SPECIAL_PROBES])):
        if any(token in text for token in extra):
            continue
        expected, ids = stored.encode(text, add_special_tokens=special).ids, read(text)
        if ids != expected:
            cause = f"{type(tokenizer).__name__} reads {text[:_SHOWN]!r} as {ids[:8]}, {FILE} as {expected[:8]}"
            raise load_failed("CERTIFICATE", f"the tokenizer of {folder} is not that of {FILE}: {cause}: {_REMEDY}")


def tokenizer_limit(folder: Path) -> int | None:
    """Return the tokenizer's limit for the tokens of a text; None if its configuration has no limit."""
    limit = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return int(limit) if limit and limit < UNLIMITED else None


def bare_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return a copy of the backend of a transformers tokenizer, without truncation and padding. Raises ModelLoadFailed
    INCOMPATIBLE without a fast backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise incompatible(f"{type(tokenizer).__name__} has no fast tokenizer")
    bare = Tokenizer.from_str(backend.to_str())
    bare.no_truncation()
    bare.no_padding()
    return bare


def load_tokenizer(folder: Path, load: LoadOptions, settings: TransformerSettings = _NO_SETTINGS) -> Tokenizer:
    """Return the fast tokenizer of `folder`, without truncation and padding, changed according to the `settings` of
    sentence-transformers. Raises ModelLoadFailed: NOT_FOUND without a tokenizer; INCOMPATIBLE for a tokenizer that is
    unreadable, has no fast backend, or has no end token although load.append_eos is set; CERTIFICATE if the files
    lack a special token that the tokenizer adds to texts, or the unknown token of a WordPiece or WordLevel model.
    """
    tokenizer = read_tokenizer(folder, trust_remote_code=load.trust_remote_code, **settings.tokenizer)
    bare = bare_tokenizer(tokenizer)
    if settings.lowercases:
        bare = with_normalizers(bare, [normalizers.Lowercase()])
    if (folder / FILE).is_file():
        is_library = type(tokenizer).__module__.startswith("transformers.")
        _check_probes(
            folder,
            lambda text: bare.encode(text, add_special_tokens=is_library).ids,
            tokenizer,
            is_library,
            lowercases=settings.lowercases,
        )
    _refuse_invented(folder, bare)
    if load.append_eos and bare.encode("a").ids[-1] != tokenizer.eos_token_id:
        if tokenizer.eos_token_id is None:
            raise incompatible("load.append_eos is set and the tokenizer has no end token")
        bare = _ended(bare, str(tokenizer.eos_token), tokenizer.eos_token_id)
    return bare if "token_type_ids" in tokenizer.model_input_names else _untyped(bare)


def text_tokenizer(modules: Modules, load: LoadOptions) -> Tokenizer:
    """Return the tokenizer of a text model. Raises the errors of `load_tokenizer`, and ModelLoadFailed INCOMPATIBLE if
    the folder has different tokenizers for queries and for documents.
    """
    tokenizer = load_tokenizer(modules.folder, load, modules.transformer)
    if modules.query_folder is not None:
        own = bare_tokenizer(read_tokenizer(modules.query_folder, trust_remote_code=load.trust_remote_code))
        if _reading(own) != _reading(tokenizer):
            raise incompatible(
                "router_config.json names different tokenizers for queries and documents; this adapter supports one"
            )
    return tokenizer


def _reading(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the parts of a tokenizer that determine the ids of a text, without the special tokens around the text."""
    state = json.loads(tokenizer.to_str())
    added = {token["content"]: token["id"] for token in state["added_tokens"]}
    return {"added": added, **{part: state[part] for part in ("normalizer", "pre_tokenizer", "model")}}


def with_normalizers(tokenizer: Tokenizer, steps: Sequence[Any]) -> Tokenizer:
    own = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
    tokenizer.normalizer = normalizers.Sequence([*steps, *own])
    return tokenizer


def _refuse_invented(folder: Path, tokenizer: Tokenizer) -> None:
    stored = _stored_tokens(folder)
    if stored is None:
        return
    used = {tokenizer.id_to_token(number) or f"token with the id {number}" for number in _around(tokenizer)}
    if isinstance(tokenizer.model, models.WordPiece | models.WordLevel):
        # these models encode a word outside the vocabulary as the unknown token, and raise if that token is missing
        used.add(tokenizer.model.unk_token)
    if lacking := sorted(used - {None} - stored):
        cause = f"the vocabulary in {folder} has no {', '.join(lacking)}, which the model needs in its input"
        raise load_failed("CERTIFICATE", f"{cause}: {_REMEDY}")


def _stored_tokens(folder: Path) -> set[str] | None:
    """Return all tokens in the files; None if the folder has only a sentencepiece file, which is not read here."""
    tokens: set[str] = set()
    if (file := folder / FILE).is_file():
        tokens.update(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
    elif (file := folder / "vocab.txt").is_file():
        tokens.update(file.read_text("utf-8").splitlines())
    elif (file := folder / "vocab.json").is_file():
        tokens.update(json.loads(file.read_text("utf-8")))
    else:
        return None
    if (file := folder / "added_tokens.json").is_file():
        tokens.update(json.loads(file.read_text("utf-8")))
    if (file := folder / "tokenizer_config.json").is_file():
        added = json.loads(file.read_text("utf-8")).get("added_tokens_decoder") or {}
        tokens.update(token["content"] for token in added.values())
    return tokens


def _around(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the tokenizer adds around a single text, and around and between two texts."""
    encodings = (tokenizer.encode(""), tokenizer.encode("", ""))
    return [
        number
        for encoding in encodings
        for number, is_put in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        if is_put
    ]


def _ended(tokenizer: Tokenizer, token: str, number: int) -> Tokenizer:
    """Return the tokenizer with `token` after each text. If the post-processor has a template, the template is edited,
    because a second template would discard the tokens that the first template adds to a pair.
    """
    state = json.loads(tokenizer.to_str())
    processor = state["post_processor"]
    last = processor["processors"][-1] if processor and processor["type"] == "Sequence" else processor
    if last is None or last["type"] == "ByteLevel":
        ends = processors.TemplateProcessing(
            single=f"$A {token}", pair=f"$A {token} $B:1 {token}:1", special_tokens=[(token, number)]
        )
        tokenizer.post_processor = ends if last is None else processors.Sequence([tokenizer.post_processor, ends])
        return tokenizer
    if last["type"] != "TemplateProcessing":
        raise incompatible(
            f"load.append_eos is set, but the tokenizer's post-processor {last['type']} cannot be extended"
        )
    last["special_tokens"][token] = {"id": token, "ids": [number], "tokens": [token]}
    for template in (last["single"], last["pair"]):
        for place in reversed([place for place, piece in enumerate(template) if "Sequence" in piece]):
            template.insert(
                place + 1, {"SpecialToken": {"id": token, "type_id": template[place]["Sequence"]["type_id"]}}
            )
    return Tokenizer.from_str(json.dumps(state))


def _untyped(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the token type 0 for all tokens of a pair. transformers passes no token types to the
    model if the tokenizer's `model_input_names` has no token_type_ids.
    """
    state = json.loads(tokenizer.to_str())
    processor = state["post_processor"]
    # BertProcessing has no template: its second text always has the type 1
    if processor and processor["type"] == "BertProcessing":
        (cls, first), (sep, last) = processor["cls"], processor["sep"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[cls, "$A", sep], pair=[cls, "$A", sep, "$B", sep], special_tokens=[(cls, first), (sep, last)]
        )
        return tokenizer
    state["post_processor"] = json.loads(
        json.dumps(processor), object_hook=lambda part: {**part, "type_id": 0} if "type_id" in part else part
    )
    return Tokenizer.from_str(json.dumps(state))


def special_ids(folder: Path, load: LoadOptions, roles: Sequence[str] = ()) -> frozenset[int]:
    """Return the ids of the special tokens with these roles, e.g. pad, or of all special tokens if `roles` is empty. A
    role without a token is left out.
    """
    tokenizer = read_tokenizer(folder, trust_remote_code=load.trust_remote_code)
    if not roles:
        return frozenset(tokenizer.all_special_ids)
    numbers = (getattr(tokenizer, f"{role}_token_id", None) for role in roles)
    return frozenset(number for number in numbers if number is not None)


def fitted(tokenizer: Tokenizer, table: int) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer without the special tokens that have no row in a table of `table` embeddings, and the list
    of these tokens. Published models have such tokens, for example for images. Their strings are then tokenised like
    other text. The unknown token, and tokens that the tokenizer adds to texts, are not removed: `fault` reports them.
    """
    around = set(_around(tokenizer))
    beyond = {
        token.content
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if number >= table
        and token.special
        and number not in around
        and token.content != getattr(tokenizer.model, "unk_token", None)
    }
    if not beyond:
        return tokenizer, []
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in beyond]
    if isinstance(vocabulary := state["model"].get("vocab"), dict):
        state["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token not in beyond}
    return Tokenizer.from_str(json.dumps(state)), sorted(beyond)


def fault(tokenizer: Tokenizer, table: int, needs: TokenNeeds = _NO_NEEDS) -> str:
    """Return why a tokenizer cannot belong to a model with `table` embeddings, and a remedy. Return an empty string if
    no check fails.
    """
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    around = [number for number in _around(tokenizer) if number >= table]
    if largest >= table or around:
        cause = f"its tokenizer has ids up to {max([largest, *around])}, but its embedding table has {table} rows"
        return (
            f"{cause}: {_REMEDY}, or resize the table (resize_token_embeddings) before the model is trained with more "
            "tokens"
        )
    try:
        # all samples are tokenised: a tokenizer may fail only on texts of some scripts
        shares = [_share(tokenizer, text) for text in SAMPLES.values()]
        text, pair = tokenizer.encode(SAMPLES["Latin"]), tokenizer.encode("a", "a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  a Rust panic of tokenizers is a BaseException, not an Exception
        return f"its tokenizer fails on a plain sentence ({error}): {_REMEDY}"
    if not any(share > _KNOWN for share in shares):
        scripts = f"{', '.join(list(SAMPLES)[:6])} and {len(SAMPLES) - 6} others"
        return (
            f"its tokenizer, of {tokenizer.get_vocab_size()} tokens, reads plain sentences ({scripts}) as unknown "
            f"tokens: {_REMEDY}"
        )
    if needs.begins and not (text.special_tokens_mask and text.special_tokens_mask[0]):
        return f"its tokenizer puts no special token before a text, but the model reads that token: {_REMEDY}"
    if needs.separates and not _separated(pair):
        return f"its tokenizer puts no special token between two texts that the model scores as a pair: {_REMEDY}"
    return ""


def _separated(pair: Encoding) -> bool:
    sides = pair.sequence_ids
    return 0 in sides and 1 in sides and None in sides[sides.index(0) : sides.index(1)]


def _share(tokenizer: Tokenizer, text: str) -> float:
    """Return the fraction of the characters in `text` that the model can read: those in tokens outside `_unread_ids`.
    White space does not count.
    """
    encoding = tokenizer.encode(text, add_special_tokens=False)
    unread = _unread_ids(tokenizer)
    read = {
        place
        for number, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        if number not in unread
        for place in range(start, stop)
    }
    places = [place for place, character in enumerate(text) if not character.isspace()]
    return sum(place in read for place in places) / len(places)


def _unread_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of special tokens and of the unknown token. A model cannot read the characters in these tokens."""
    unread = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    unknown = getattr(tokenizer.model, "unk_token", None)
    if unknown is not None and (number := tokenizer.token_to_id(unknown)) is not None:
        unread.add(number)
    if isinstance(tokenizer.model, models.Unigram):
        unread.update(tokenizer.encode(_UNKNOWN_SIGN, add_special_tokens=False).ids)
    return unread
