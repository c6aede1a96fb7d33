"""Tokenizers of the kinds that real checkpoints carry, trained on a small generated corpus.

    TokenizerRecipe ──► train ──► tokenizers.Tokenizer ──► save: tokenizer.json and tokenizer_config.json

The special tokens get the ids 0, 1, .. in the order in which a recipe lists them, so a recipe decides where the pad id
lies.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from oracle import WORDS
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

Algorithm = Literal["wordpiece", "byte-level", "unigram"]

# The part that matters here of the pattern by which Qwen2 and Llama 3 split: words keep their leading space, and digits
# stand alone.
_WORDS_WITH_SPACE = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class TokenizerRecipe:
    """`specials` in id order; `roles` maps pad, unk, cls, sep, mask, bos, eos to one of them.

    `single` and `pair` are templates of the tokenizers library; `$B:1` and `[SEP]:1` have token type 1.
    """

    algorithm: Algorithm
    specials: tuple[str, ...]
    roles: dict[str, str]
    single: str
    pair: str
    token_types: bool = False
    padding_side: Literal["left", "right"] = "right"
    vocabulary: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary", {token: number for number, token in enumerate(self.specials)})

    def ids(self) -> dict[str, int]:
        """The special ids as a config.json names them: `pad_token_id` and so on."""
        return {f"{role}_token_id": self.vocabulary[token] for role, token in self.roles.items()}

    def train(self) -> Tokenizer:
        """Return a new tokenizer, which is the same for the same recipe."""
        tokenizer = {"wordpiece": _wordpiece, "byte-level": _byte_level, "unigram": _unigram}[self.algorithm](self)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=self.single, pair=self.pair, special_tokens=list(self.vocabulary.items())
        )
        return tokenizer

    def save(self, folder: Path, max_tokens: int) -> int:
        """Write the files of the tokenizer. Return the number of its ids."""
        tokenizer = self.train()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            model_max_length=max_tokens,
            padding_side=self.padding_side,
            model_input_names=["input_ids", *(["token_type_ids"] if self.token_types else []), "attention_mask"],
            **{f"{role}_token": token for role, token in self.roles.items()},
        ).save_pretrained(folder)
        return tokenizer.get_vocab_size()


@functools.cache
def corpus() -> tuple[str, ...]:
    """Lines of the words of the tests, each at the start of a line as well as inside one, with other scripts, digits
    and marks between.
    """
    rng = random.Random(0)
    rare = ("Zürich", "東京", "naïve", "mañana", "2026", "3.14", "it's", "(a)", "e-mail", "ÅNGSTRÖM")
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(400)]
    lines += [
        f"{word} {rng.choice(rare)}, {rng.choice(WORDS)}s and un{rng.choice(WORDS)}able."
        for word in WORDS
        for _ in range(4)
    ]
    return tuple(lines)


def word_pieces() -> list[str]:
    """Return sorted pieces, which BPE learns: those of the library's WordPiece trainer, and their order, are random."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=300, show_progress=False))
    return sorted(tokenizer.get_vocab())


def _wordpiece(recipe: TokenizerRecipe) -> Tokenizer:
    pieces = word_pieces()
    vocabulary = (*recipe.specials, *pieces, *(f"##{piece}" for piece in pieces))
    unknown = recipe.roles["unk"]
    model = models.WordPiece({token: number for number, token in enumerate(vocabulary)}, unk_token=unknown)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(recipe.specials))
    return tokenizer


def _byte_level(recipe: TokenizerRecipe) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS_WITH_SPACE), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(recipe.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _unigram(recipe: TokenizerRecipe) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=list(recipe.specials), unk_token=recipe.roles["unk"], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    # The trainer gives rare characters random scores; here they all have the lowest score.
    learnt = json.loads(tokenizer.to_str())["model"]["vocab"][len(recipe.specials) :]
    lowest = round(min(score for _, score in learnt), 2)
    pieces = [(piece, lowest if len(piece) == 1 else round(score, 4)) for piece, score in learnt]
    pieces.sort(key=lambda piece: (-piece[1], piece[0]))
    unknown = recipe.vocabulary[recipe.roles["unk"]]
    tokenizer.model = models.Unigram([*((token, 0.0) for token in recipe.specials), *pieces], unknown)
    return tokenizer


def _bert_like(algorithm: Algorithm, *specials: str, token_types: bool = False) -> TokenizerRecipe:
    roles = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    return TokenizerRecipe(algorithm, specials, roles, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", token_types)


def _roberta_like(algorithm: Algorithm, *specials: str, unk: str = "<unk>") -> TokenizerRecipe:
    roles = {"unk": unk, "cls": "<s>", "sep": "</s>", "bos": "<s>", "eos": "</s>", "pad": "<pad>", "mask": "<mask>"}
    return TokenizerRecipe(algorithm, specials, roles, "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def _decoder(algorithm: Algorithm, *specials: str, single: str, **roles: str) -> TokenizerRecipe:
    return TokenizerRecipe(algorithm, specials, roles, single, single.replace("$A", "$A $B"), padding_side="left")


# pad 5
BERT = _bert_like("wordpiece", "[UNK]", "[unused0]", "[unused1]", "[MASK]", "[CLS]", "[PAD]", "[SEP]", token_types=True)
DISTILBERT = _bert_like("wordpiece", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]")  # pad 3
MODERNBERT = _bert_like("byte-level", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")  # pad 3
DEBERTA = _bert_like("unigram", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", token_types=True)  # pad 3
# pad 5: positions start at 6
ROBERTA = _roberta_like("byte-level", "<s>", "<unk>", "</s>", "<mask>", "<unused>", "<pad>")
XLM_ROBERTA = _roberta_like("unigram", "<s>", "<pad>", "</s>", "<unk>", "<mask>")  # pad 1
MPNET = _roberta_like("wordpiece", "<s>", "<pad>", "</s>", "[UNK]", "<mask>", unk="[UNK]")  # pad 1
# As in Qwen3-Embedding: one token ends every text and pads it.
QWEN = _decoder(
    "byte-level",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    single="$A <|endoftext|>",
    eos="<|endoftext|>",
    pad="<|endoftext|>",
)
MISTRAL = _decoder(
    "unigram", "<unk>", "<s>", "</s>", "<pad>", single="<s> $A </s>", unk="<unk>", bos="<s>", eos="</s>", pad="<pad>"
)
LLAMA = _decoder(
    "unigram", "<unk>", "<s>", "</s>", "<pad>", single="<s> $A", unk="<unk>", bos="<s>", eos="</s>", pad="<pad>"
)
GEMMA = _decoder(
    "unigram",
    "<unk>",
    "<eos>",
    "<bos>",
    "<pad>",
    single="<bos> $A <eos>",
    unk="<unk>",
    bos="<bos>",
    eos="<eos>",
    pad="<pad>",
)
