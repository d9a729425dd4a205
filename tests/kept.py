"""What classes keep in collections, and how long it stays. What is more than names and numbers is
on docs/MEMORY.md, with its bound (test_memory_page.py).
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("client", "worker", "wire", "weights", "crossing", "methods", "attention", "comm", "planner")
MADE = "dict list set deque Counter OrderedDict defaultdict WeakKeyDictionary WeakValueDictionary WeakSet"
# What outlives a pool is a few names or numbers for each model, layout, node or function there is
LIFETIMES = {
    "an evaluation, a call or an answer": (
        "Course Done Frame InPatches Joint KeptRows Lookahead Prediction Region Rows RunFigures Shards Traffic"
    ),
    "a run": (
        "AttentionOverride BlockClock Calls Conds EnteredBlocks Evaluation FreeRun GuiderSeam KVBuffers"
        " KeptTokens PoolSampling PromptTimes RopeCache RowsApart Run Slot StageMessages StepTimes Steps Timeline Waiting"
    ),
    "a model in the pool, a MODEL or a VAE": (
        "Assembly BandsOfRows CompiledBlocks Constants DeviceWeights Disassembly InBlockPatches InGroups"
        " KnownSteps Loan NodePatches OffloadedWeights Order PackState PatchedSets PipelineBackend PoolDecoding Readers"
        " RecordedForward RemoteVAE Resident ResidentModel RowsKnown ShardedLayer ShardedWeights StageHooks"
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


@cache
def kept_by_all():
    folders = [ROOT / "nodes", *(ROOT / "parallel_runtime" / room for room in ROOMS)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return {one for file in files for one in kept_by(file.read_text(encoding="utf-8"))}
