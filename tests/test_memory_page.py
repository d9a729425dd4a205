"""What is kept from one evaluation, run or model to the next: docs/MEMORY.md names it, with its
bound, and nothing is kept that neither the page nor a list here knows of.
"""

import ast
import re
from dataclasses import fields

import pytest
from pipemesh.nodes.status.figures import MemoryFigures, SharedFigures
from pipemesh.parallel_runtime.client import ahead, calls, patched_weights, runs
from pipemesh.parallel_runtime.comm import in_step
from pipemesh.parallel_runtime.methods import recorded
from pipemesh.parallel_runtime.wire import arena
from pipemesh.parallel_runtime.worker import device_memory

from .conftest import ROOT

PAGE = (ROOT / "docs" / "MEMORY.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
KEPT = re.compile(r"`(\w+\.\w+)`")
ROOMS = ("client", "worker", "wire", "weights", "crossing", "methods", "attention", "comm", "planner")
MADE = "dict list set deque Counter OrderedDict defaultdict WeakKeyDictionary WeakValueDictionary WeakSet"
# How long what a class has in collections stays. What outlives all of these is a few names or
# numbers for each model, layout, node or function that there is.
LIFETIMES = {
    "an evaluation, a call or an answer": (
        "Course Done Frame InPatches Joint KeptRows Lookahead Prediction Region Rows RunFigures Shards Traffic"
    ),
    "a run": (
        "AttentionOverride BlockClock Calls Conds EnteredBlocks Evaluation FreeRun GuiderSeam KVBuffers"
        " KeptTokens PoolSampling PromptTimes RopeCache Run Slot StageMessages StepTimes Steps Timeline Waiting"
    ),
    "a model in the pool, a MODEL or a VAE": (
        "Assembly BandsOfRows CompiledBlocks Constants DeviceWeights Disassembly InBlockPatches InGroups"
        " KnownSteps Loan NodePatches OffloadedWeights Order PackState PatchedSets PipelineBackend PoolDecoding Readers"
        " RecordedForward RemoteVAE Resident ResidentModel RowsApart ShardedLayer ShardedWeights StageHooks"
        " StoredTensors TokenHooks Turns Weights WholeForward"
    ),
    "a pool": (
        "Allocator Arena Channel ConditioningCache InStep KeptConditioning Mover RankLoop RequestHandler"
        " Segment Sends Sent SequenceComm Session ShardGather StageLink StopFlag Trail"
    ),
    "ComfyUI or a worker": (
        "Auto Beside Counts Evaluations LookAhead OpaqueAttention Planning Residency Runs Runtime Seam"
        " StageBalance Switch _tell_of_sage alike cut_latent figures opaque_attention operation reasons"
        " tell_uncompiled words_of_class"
    ),
    "a count, in a process of its own": "DeviceCounts Memory QuickFakeMode Recorder kind_of",
}
MIB = 1 << 20
# How each row begins, and what of the code its words stand for
BOUNDS = {
    "Memory that": (f"take, and {arena.KEPT_ARENA // MIB} MiB; {arena.KEPT_ARENA // MIB} MiB between runs",),
    "Prompts in it": (f"{arena.KEPT_CONDITIONING // MIB} MiB",),
    "Copies of these": (f"{arena.KEPT_CONDITIONING // MIB} MiB",),
    "A run's prompts": (f"{arena.KEPT_CONDITIONING // MIB} MiB",),
    "Memory of messages": (f"1/{device_memory.LITTLE} of",),
    "The order of": (f"{in_step.KEPT_KINDS} kinds of a model between runs",),
    "CUDA graphs": (f"{recorded.MOST} of a model; 1/{device_memory.LITTLE} of",),
    "Sets of patched": (f"1/{1 / patched_weights.SHARE_OF_SETS:.0f} of",),
    "Pictures of the queue": (f"{ahead.MOST_BYTES >> 30} GiB",),
    "Latents by which": (f"{calls.KEPT_LATENTS // MIB} MiB",),
    "Figures of runs": (f"{runs.KEPT} runs; {runs.MOST_EVALUATIONS} evaluations",),
}
FIGURES = {
    "shared": {one.name for one in fields(SharedFigures)},
    "memory": {one.name for one in fields(MemoryFigures)},
    "queue": {one.name for one in fields(ahead.Images)},
}


def name_of(node):
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_collection(value):
    if not isinstance(value, ast.Call):
        return isinstance(value, (ast.Dict, ast.List, ast.Set))
    if name_of(value.func) == "field":
        return any(
            name_of(one.value) in MADE.split() for one in value.keywords if one.arg == "default_factory"
        )
    return name_of(value.func) in MADE.split() or is_memoised(value.func)


def is_memoised(decorator):
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return name_of(call) in ("cache", "lru_cache")


def assigned(function):
    """The attributes of ``self`` that are set to a collection."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
            for one, value in pairs:
                if isinstance(one, ast.Attribute) and name_of(one.value) == "self" and is_collection(value):
                    yield one.attr


def kept_by(text):
    """What a module's classes have in collections, ``Class.name``, and memoised functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and any(map(is_memoised, node.decorator_list)):
            yield node.name
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and item.value is not None and is_collection(item.value):
                yield f"{node.name}.{item.target.id}"
            elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
                yield from (f"{node.name}.{name}" for name in assigned(item))


def kept_by_all():
    folders = [ROOT / "nodes", *(ROOT / "parallel_runtime" / room for room in ROOMS)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return {one for file in files for one in kept_by(file.read_text(encoding="utf-8"))}


def test_whatever_classes_have_in_collections_is_on_the_page_or_of_a_known_lifetime():
    known = [name for names in LIFETIMES.values() for name in names.split()]
    assert len(known) == len({*known})
    assert {one.partition(".")[0] for one in kept_by_all()} == {*known}


def test_the_page_names_what_is_kept_with_the_bounds_and_the_figures_of_the_code():
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in ROWS]
    attributes = {one for what, *_ in cells for one in KEPT.findall(what)}
    assert attributes <= kept_by_all() and len(attributes) >= 12
    for begins, words in BOUNDS.items():
        (most,) = [most for what, _, most, *_ in cells if what.startswith(begins)]
        assert all(one in most for one in words), begins
    counted = {one for *_, figure in cells for one in re.findall(r"`(\w+)\.(\w+)`", figure)}
    assert all(name in FIGURES[figure] for figure, name in counted) and len(counted) >= 8


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __init__(self):\n        self.a, self.b = 0, {}",
        "class A:\n    b: dict = field(default_factory=dict)",
        "class A:\n    def __init__(self):\n        self.b: dict[int, int] = OrderedDict()",
    ],
)
def test_a_collection_is_found_however_it_is_made(text):
    assert [*kept_by(text)] == ["A.b"]
