"""Conversion of model files of the open-source SIE project to entries of this catalogue.

    a file with sie_id ──► translated ──► Translation: an entry, and the fields that have no counterpart
                               └ ValidationFailed: the field for which no family here has a counterpart

A model file names a Python class of that project for each profile. The class determines the family of the entry. Values
that the file does not have are copied from this catalogue's entry of the same model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import msgspec

from sie_contracts.errors import ValidationFailed, faulty
from sie_contracts.models import families
from sie_contracts.models.entries import POOLING_OPTIONS, VECTORS, Precision
from sie_contracts.models.muvera import Muvera
from sie_contracts.names import located


class _Kind(NamedTuple):
    family: str
    public: families.PublicClass


# option in a public file -> (part of an entry, field of this part with the same meaning)
_LOADTIME = {
    "append_eos": ("load", "append_eos"),
    "causal": ("load", "causal"),
    "normalize": ("run", "normalize"),
    "query_prefix": ("head", "query_marker"),
    "doc_prefix": ("head", "document_marker"),
    "query_max_length": ("head", "query_length"),
    "doc_max_length": ("head", "document_length"),
    "query_expansion": ("head", "query_expansion"),
    "doc_punctuation_skiplist": ("head", "skip_punctuation"),
    "muvera_config": ("head", "muvera"),
    "yes_token": ("head", "yes_token"),
    "no_token": ("head", "no_token"),
    "score_mode": ("head", "score"),
    "input_format": ("pair", ""),
    "default_instruction": ("prompts", "default_instruction"),
}
_RUNTIME = {
    "pooling": ("run", "pooling"),
    "normalize": ("run", "normalize"),
    "output_types": ("run", "output_types"),
    "output_dtype": ("run", "output_dtype"),
    "instruction": ("run", "instruction"),
    "lora_id": ("run", "lora"),
    "muvera": ("run", "muvera"),
    "query_max_length": ("head", "query_length"),
    "max_seq_length": ("head", "document_length"),
    "query_template": ("prompts", "query"),
    "doc_template": ("prompts", "document"),
    "default_instruction": ("prompts", "default_instruction"),
}
_OF_VECTORS = frozenset({"pooling", "normalize", "output_types", "output_dtype"})
_SCORES = {"log_softmax": "probability", "logit_diff": "difference"}
_TURN = "<|im_end|>\n<|im_start|>assistant\n"
_PAIRS = {
    "qwen3": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        f"{_TURN}<think>\n\n</think>\n\n",
    ),
    "mxbai": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n",
        "instruction: {instruction}\n",
        "query: {query}",
        "\n",
        "document: {document}",
        "\n",
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
        _TURN,
    ),
}
"""Pieces of a `pair` template, by the value of `input_format` in a public file."""


class _Dim(msgspec.Struct, frozen=True):
    dim: int


class _PublicEncode(msgspec.Struct, frozen=True):
    dense: _Dim | None = None
    sparse: _Dim | None = None
    multivector: _Dim | None = None


class _PublicTasks(msgspec.Struct, frozen=True):
    encode: _PublicEncode | None = None
    score: dict[str, Any] | None = None
    extract: dict[str, Any] | None = None
    generate: dict[str, Any] | None = None


class _Options(msgspec.Struct, frozen=True):
    loadtime: dict[str, Any] = {}
    runtime: dict[str, Any] = {}


class _PublicProfile(msgspec.Struct, frozen=True):
    extends: str | None = None
    adapter_path: str | None = None
    compute_precision: str | None = None
    adapter_options: _Options = _Options()


class _Model(msgspec.Struct, frozen=True):
    tasks: _PublicTasks
    profiles: dict[str, _PublicProfile]
    sie_id: str = ""
    hf_id: str | None = None
    hf_revision: str | None = None
    weights_path: str | None = None
    package_backed: bool = False
    inputs: dict[str, bool] = {}
    max_sequence_length: int | None = None


@dataclass(frozen=True)
class Translation:
    """Result of a translation: the entry as a document, and the ignored fields of the file, each with the reason."""

    entry: dict[str, Any]
    ignored: tuple[str, ...] = ()


# Entry in progress for one profile of a public model file: name of a part of the entry (load, run, head, prompts, pair)
# -> fields of this part. The key `ignored` has path -> reason for each ignored field of the file.
_Draft = defaultdict[str, dict[str, Any]]


def is_public(raw: Any) -> bool:
    return isinstance(raw, dict) and "id" not in raw and ("sie_id" in raw or "hf_id" in raw)


def translated(raw: Mapping[str, Any], present: Mapping[str, Any] | None = None) -> Translation:
    """Translate a model file to an entry. `present`: this catalogue's entry of the same model, if there is one.

    Raises ValidationFailed for a model that no family here supports, and for a file that lacks a necessary value.
    """
    try:
        model = msgspec.convert(raw, _Model)
    except msgspec.ValidationError as error:
        raise faulty(*located(str(error))) from error
    return _Translator(raw, model, present or {}).translation()


class _Translator:
    def __init__(self, raw: Mapping[str, Any], model: _Model, present: Mapping[str, Any]) -> None:
        self._raw = raw
        self._model = model
        self._present = present
        self._ignored: dict[str, str] = {}

    def translation(self) -> Translation:
        model = self._model
        if model.tasks.generate is not None:
            raise faulty("$.tasks.generate", "this server encodes, scores and extracts, but generates no text")
        if not model.profiles:
            raise faulty("$.profiles", "expected at least one profile")
        base = "default" if "default" in model.profiles else next(iter(model.profiles))
        kind = self._kind(base)
        self._name_unread()
        outputs = self._outputs(kind)
        own = self._draft(base, kind, outputs)
        profiles: dict[str, dict[str, Any]] = {}
        if base != "default":
            profiles[base] = {}
            self._ignored["profiles"] = f"the file has no default profile, so {base} becomes the default"
        for name in model.profiles:
            if name != base and (profile := self._profile(name, kind, own, outputs)) is not None:
                profiles[name] = profile
        self._ignored |= own["ignored"]
        if own["run"].get("normalize"):  # an entry does not need `normalize: true`, which is the default
            del own["run"]["normalize"]
        parts = {name: part for name in ("load", "run", "head", "prompts") if (part := own[name])}
        entry: dict[str, Any] = {
            **({"id": model.sie_id} if model.sie_id else {}),
            "family": kind.family,
            "weights": self._weights(kind),
            "outputs": outputs,
            **({"inputs": list(kind.public.inputs)} if kind.public.inputs != ("text",) else {}),
            "max_tokens": self._max_tokens(),
            **parts,
            **own["pair"],
        }
        rest = {name: value for name, value in self._present.items() if name not in ("profiles", *entry)}
        for name in parts:
            entry[name] = _overlaid(self._present.get(name, {}), entry[name])
        if profiles:
            entry["profiles"] = profiles
        return Translation({**entry, **rest}, tuple(f"{path}: {why}" for path, why in self._ignored.items()))

    def _kind(self, profile: str) -> _Kind:
        loc = f"$.profiles.{profile}.adapter_path"
        name = (self._flat(profile).adapter_path or "").rpartition(":")[2]
        if not name:
            raise faulty(loc, "expected the class that runs the model")
        kinds = [
            _Kind(family, row.public_classes[name])
            for family, row in families.rows().items()
            if name in row.public_classes
        ]
        options = self._flat(profile).adapter_options.runtime.keys() | {""} if kinds else set()
        kind = max(
            (kind for kind in kinds if kind.public.option in options), key=lambda kind: kind.public.option, default=None
        )
        if kind is None:
            raise faulty(
                loc, f"no family here does what {name[:80]} does; `sie models inspect` says which family fits a folder"
            )
        if not kind.public.is_complete and kind.family != self._present.get("family"):
            raise faulty(
                loc,
                f"a {kind.family} needs prompts, which the file does not have; `sie models add` reads them from the "
                "files of the model",
            )
        return kind

    def _flat(self, name: str) -> _PublicProfile:
        """Return a profile, completed from the profile that it extends. Options of a kind (loadtime or runtime) in the
        profile replace all inherited options of this kind. Raises ValidationFailed for an unknown `extends`.
        """
        profile = self._model.profiles[name]
        parent = self._model.profiles.get(profile.extends or "")
        if parent is None:
            if profile.extends:
                raise faulty(f"$.profiles.{name}.extends", f"expected a profile name, got {profile.extends[:80]!r}")
            return profile
        options, inherited = profile.adapter_options, parent.adapter_options
        return _PublicProfile(
            adapter_path=profile.adapter_path or parent.adapter_path,
            compute_precision=profile.compute_precision or parent.compute_precision,
            adapter_options=_Options(options.loadtime or inherited.loadtime, options.runtime or inherited.runtime),
        )

    def _name_unread(self) -> None:
        for name, value in self._raw.items():
            if name not in _Model.__struct_fields__ and value:
                self._ignored[str(name)] = _WHY.get(str(name), _NOTHING)
        for kind, is_read in self._model.inputs.items():
            if is_read and kind == "video":
                self._ignored["inputs.video"] = "no family of SIE reads videos"
        for name in self._model.profiles:
            for unread in sorted(self._raw["profiles"][name].keys() - set(_PublicProfile.__struct_fields__)):
                if not any(path.endswith(f".{unread}") for path in self._ignored):
                    self._ignored[f"profiles.{name}.{unread}"] = _WHY.get(unread, _NOTHING)

    def _weights(self, kind: _Kind) -> dict[str, Any]:
        model = self._model
        if kind.public.package:
            if model.hf_id:
                self._ignored["hf_id"] = f"ignored, because the package {kind.public.package} contains the model"
            return {"package": kind.public.package}
        if not (model.hf_id or model.weights_path):
            raise faulty("$.hf_id", "expected the repository or the folder of the weights")
        present = self._present.get("weights", {})
        weights = dict(present) if present.get("hub", "") == (model.hf_id or "") else {}
        if model.hf_id:
            weights["hub"] = model.hf_id
            if model.hf_revision:
                weights["revision"] = model.hf_revision
                weights.pop("unpinned", None)
            elif not weights.get("revision"):
                weights["unpinned"] = True
                self._ignored["hf_revision"] = (
                    "the file names no commit: nothing is downloaded until `sie models add --revision` pins one"
                )
        if model.weights_path:
            weights["path"] = model.weights_path
        return weights

    def _outputs(self, kind: _Kind) -> dict[str, int]:
        tasks = self._model.tasks
        widths = {name: dim.dim for name in VECTORS if (dim := getattr(tasks.encode, name, None)) is not None}
        if widths and not families.row(kind.family).gives_vectors:
            raise faulty("$.tasks.encode", f"a {kind.family} gives no vectors")
        outputs = dict(widths)
        # a model that has only multivectors can always score, so it needs no output `score`
        if tasks.score is not None and widths.keys() != {"multivector"}:
            outputs["score"] = 0
        if tasks.extract is not None:
            outputs |= dict.fromkeys(kind.public.extracts, 0)
        if not outputs:
            raise faulty("$.tasks", f"expected a task that the family {kind.family} supports")
        present = self._present.get("outputs", {})
        is_same = kind.family == self._present.get("family") and not widths and tasks.extract is not None
        return dict(present) if is_same and present else outputs

    def _max_tokens(self) -> int:
        tokens = self._model.max_sequence_length or self._present.get("max_tokens")
        if not isinstance(tokens, int):
            raise faulty(
                "$.max_sequence_length", "expected the maximum number of tokens of a text: SIE has no default for it"
            )
        return tokens

    def _profile(self, name: str, kind: _Kind, own: _Draft, outputs: Mapping[str, int]) -> dict[str, Any] | None:
        """Return the differences of a profile from the default profile. Return None if the profile has another family,
        or a class for which no family exists; then the profile is added to the ignored fields.
        """
        try:
            variant = self._kind(name)
        except ValidationFailed as error:
            self._ignored[f"profiles.{name}"] = error.extras["errors"][0]["message"]
            return None
        if variant.family != kind.family:
            self._ignored[f"profiles.{name}"] = (
                f"its family is {variant.family}, but that of the default profile is {kind.family}"
            )
            return None
        draft = self._draft(name, kind, outputs)
        for part in ("head", "prompts", "pair"):
            if changed := _beside(own[part], draft[part]):
                self._ignored[f"profiles.{name}"] = (
                    f"{part} ({', '.join(sorted(changed))}) belongs to the model, so no profile can change it"
                )
        for path, why in draft["ignored"].items():
            if not any(ignored_path.rpartition(".")[2] == path.rpartition(".")[2] for ignored_path in own["ignored"]):
                self._ignored[path] = why
        return {part: changed for part in ("load", "run") if (changed := _beside(own[part], draft[part]))}

    def _draft(self, name: str, kind: _Kind, outputs: Mapping[str, int]) -> _Draft:
        profile, row = self._flat(name), families.row(kind.family)
        draft: _Draft = defaultdict(dict)
        if profile.compute_precision:
            if profile.compute_precision in get_args(Precision):
                draft["load"]["precision"] = profile.compute_precision
            else:
                draft["ignored"][f"profiles.{name}.compute_precision"] = _NOTHING
        for part, table in (("loadtime", _LOADTIME), ("runtime", _RUNTIME)):
            for option, value in getattr(profile.adapter_options, part).items():
                path = f"profiles.{name}.adapter_options.{part}.{option}"
                if value is None or (value is False and option == "trust_remote_code"):
                    continue
                if option in row.parameters:
                    draft["run"].setdefault("parameters", {})[option] = value
                elif option == "classification_type" and "multi_label" in row.parameters:
                    draft["run"].setdefault("parameters", {})["multi_label"] = value == "multi-label"
                elif option in table and self._is_read(option, row, outputs):
                    self._set(draft, *table[option], value, path)
                elif option == "pooling" and "dense" not in outputs:
                    continue
                elif option != "token_dim" or value != outputs.get("multivector"):
                    draft["ignored"][path] = _WHY.get(option, _NOTHING)
        return draft

    @staticmethod
    def _is_read(option: str, row: families.Family, outputs: Mapping[str, int]) -> bool:
        if option in _OF_VECTORS:
            return row.gives_vectors and (option != "pooling" or "dense" in outputs)
        if option in ("query_max_length", "max_seq_length"):
            return "multivector" in outputs and row is families.row("text-encoder")
        if option in ("query_template", "doc_template"):
            return row.gives_vectors
        if option == "default_instruction":
            return row.gives_vectors or row.reads_answer
        if option == "muvera":
            return "multivector" in outputs
        return True

    @staticmethod
    def _set(draft: _Draft, part: str, name: str, value: Any, path: str) -> None:
        if name in ("pooling", "score") or part == "pair":
            choices: Mapping[str, Any] = {"pooling": POOLING_OPTIONS, "score": _SCORES, "": _PAIRS}[name]
            if not isinstance(value, str) or value not in choices:
                draft["ignored"][path] = f"expected one of {', '.join(choices)}"
                return
            value = choices[value]
        if part == "pair":
            draft["pair"]["pair"] = list(value)
            return
        if name == "muvera":
            if part == "head":
                if not isinstance(value, dict):
                    draft["ignored"][path] = "expected a map"
                    return
                for unread in sorted(map(str, value.keys() - set(Muvera.__struct_fields__))):
                    draft["ignored"][f"{path}.{unread}"] = _NOTHING
                value = {key: option for key, option in value.items() if key in Muvera.__struct_fields__}
            else:
                value = value if value is False else True
        if part == "prompts" and value == "{text}":
            return
        draft[part][name] = value


def _overlaid(below: Any, above: Any) -> Any:
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: _overlaid(below.get(key), value) for key, value in above.items()}}


def _beside(own: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in changed.items() if own.get(key) != value}


_NOTHING = "ignored, it has no counterpart"
_WHY = {
    "max_batch_tokens": "ignored, because SIE_MAX_BATCH_COST limits a batch",
    "trust_remote_code": "ignored, set load.trust_remote_code if the model cannot be loaded without it",
    "hf_tokenizer_dependencies": "ignored, because the model's own files name the other repositories",
    "pool": "ignored, because requests name a pool",
    "attn_implementation": "ignored, because the engine chooses the attention",
    "attention_backend": "ignored, because the engine chooses the attention",
    "output_similarity": "ignored, because clients compare the vectors",
}
