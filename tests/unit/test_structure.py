"""The structure of the product, as `tools/measure.py` counts it."""

from __future__ import annotations

import ast

import measure
import pytest
import request_path

pytestmark = pytest.mark.xdist_group("sources")  # one process parses all files

# Figures of today: they may only fall.
MOST_REUSED_CLASSES = 13
MOST_VAGUE_NAMES_OF_TESTS = 247
MOST_VAGUE_NAMES = 5

# Attributes of other objects that may be set, each with its reason.
SET_ELSEWHERE = {
    "sie_broker.nats.client self._client.options": "the client has no way to reconnect only after a first success",
    "sie_runtime.http.protocol self.cycle.server_state": "uvicorn makes its cycles itself",
    "sie_runtime.http.protocol self.cycle.transport": "uvicorn makes its cycles itself",
    "sie_adapter.packed.backbone model.config.use_cache": "the configuration of a model of transformers",
    "sie_adapter.loading.checkpoint model.config.use_cache": "the configuration of a model of transformers",
    "sie_adapter.engine.device torch.backends.cudnn.allow_tf32": "a switch of torch",
    "sie_adapter.engine.device libc.mallinfo2.restype": "how ctypes learns what a function returns",
    "sie_adapter.heads.transformers_head self.backbone.pooler": "taken out of a model of transformers",
    "sie_adapter.heads.transformers_head model.config.pad_token_id": "the configuration of a model of transformers",
    **measure.OF_EXTRAS.get("sets", {}),
}


def test_no_object_sets_the_attributes_of_another() -> None:
    names = set()
    for package in measure.PACKAGES:
        for module in measure.modules(package):
            for place in measure.assigned(module):
                where, _, name = place.partition(" ")
                names.add(f"{where.partition(':')[0]} {name}")
    assert names - set(SET_ELSEWHERE) == set(), "give it to the constructor, or make it a method of the object"
    assert set(SET_ELSEWHERE) - names == set(), "is set no more"


def test_no_except_star_clause_raises() -> None:
    """Before Python 3.11.4, an error that such a clause raises becomes part of an ExceptionGroup."""
    raising = [
        f"{module.name}:{clause.lineno}"
        for module, node in measure.nodes()
        if isinstance(node, ast.TryStar)
        for clause in node.handlers
        if any(isinstance(part, ast.Raise) for part in ast.walk(clause))
    ]
    assert raising == [], "use sie_runtime.process.task_group"


@pytest.mark.parametrize("package", measure.PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    assert measure.circles(measure.imports(measure.modules(package))) == []


def test_folders_are_rooms() -> None:
    folder, files = measure.files_by_folder().most_common(1)[0]
    assert files <= 22, folder


def test_a_class_name_has_one_meaning() -> None:
    """The client repeats names of the API: those are types of its users."""
    reused = measure.reused_classes()
    assert [name for name, places in reused.items() if measure.within_a_package(places)] == []
    assert len(reused) <= MOST_REUSED_CLASSES, reused


def test_names_and_docstrings_follow_the_rules() -> None:
    modules = [module for package in measure.PACKAGES for module in measure.modules(package)]
    vague = [name for module in modules for name in measure.vague_names(module)]
    assert len(vague) <= MOST_VAGUE_NAMES, vague
    for rule in (measure.docstrings_without_subject, measure.vague_docstrings, measure.names_that_are_gone):
        assert [place for module in modules for place in rule(module)] == [], rule.__name__


def test_names_and_docstrings_of_tests_and_benchmarks_follow_the_same_rules() -> None:
    vague, unclear = list[str](), list[str]()
    for folder in ("tests", "bench", "tools"):
        for file in sorted((measure.ROOT / folder).rglob("*.py")):
            text = file.read_text("utf-8")
            module = measure.Module(str(file.relative_to(measure.ROOT)), file, text, ast.parse(text))
            vague += measure.vague_names(module)
            unclear += measure.docstrings_without_subject(module)
    assert len(vague) <= MOST_VAGUE_NAMES_OF_TESTS, vague
    assert unclear == []


@pytest.mark.serial
def test_one_encode_enters_few_files() -> None:
    """A cluster runs whose processes record the functions that they enter. Files of extras, which may hear of requests,
    are not counted.
    """
    by_role = request_path.functions_of_encode()
    assert all(by_role.values()), "every process was recorded"
    core = [
        {file: functions for file, functions in files.items() if not file.startswith("extras/")}
        for files in by_role.values()
    ]
    files = set[str]().union(*core)
    assert len(files) <= request_path.MAX_FILES, sorted(files)
    assert sum(map(request_path.count_functions, core)) <= request_path.MAX_FUNCTIONS
