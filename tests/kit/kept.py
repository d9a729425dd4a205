"""What classes keep in collections, and how long it stays. With a star: bytes that stay from one
evaluation to the next, other than weights and what nodes attach. They are on docs/MEMORY.md, with
their bound (test_memory_page.py).
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("client", "worker", "wire", "weights", "crossing", "methods", "attention", "comm", "planner")
MADE = "dict list set deque Counter OrderedDict defaultdict WeakKeyDictionary WeakValueDictionary WeakSet"
# What outlives a pool is a few names or numbers for each model, layout, node or function there is
LIFETIMES = {
    "an evaluation, a call or an answer": (
        "Done.block_s,waited_s Frame._on_their_way,_seen,_taken"
        " Lookahead._answers,_asked LooksLater.flags,looks PieceRecorder._pieces Prediction.sent_bytes"
        " RecordedOperations._made,brought,read"
        " Rows._memoised RunFigures.exchange_by_axis Traffic.sent_bytes"
    ),
    "a run": (
        "AttentionOverride.brought,options BlockClock._begun,times Calls._counts,_latents*,_numbers"
        " Conds._origins EnteredBlocks._most Evaluation.spans"
        " FreeRun._arguments,_gathering,_seen*,_timelines,_waiting GuiderSeam._inside"
        " KVBuffers._buffers*,_filled,_left* KeptTokens._made* PoolSampling._lent,_sampled"
        " PromptTimes._runs RowsApart._not_now Run.evaluations,joined,sums RunNames.branches,groups,looked_at"
        " KeptBranch.shapes StageMessages._received,_sent StepTimes._runs,_stepped Steps._ends"
        " QueuedSampler.steps Timeline._counts"
    ),
    "a model in the pool, a MODEL or a VAE": (
        "Assembly._made,_modules BandsOfRows._put CompiledBlocks._blocks Constants.names"
        " DeviceWeights._loaded,_replaced,_unread Disassembly._kept,_numbers,code,models"
        " Division._joint,active,all_tokens InBlockPatches._functions InGroups._plan Joint._owned KeptRows.stale"
        " NodePatches._left_out OffloadedWeights._loaded,_replaced Order._follows,_seen"
        " PackState._read,taken PatchedSets._kept*,_used PatchSharding._kept_rows PipelineBackend._pieces"
        " PoolDecoding._left,_lent OptionReaders.of"
        " RemoteVAE._steps SequenceAttention._divided ObjectPatches._take_away,weights"
        " FirstResults.right,told,wrong Recordings._known* Worth.counts ShardedLayer._views ShardedWeights._replaced,_sharded"
        " StageHooks._handles StoredTensors.tensors TokenHooks._handles,told Turns._at,_take_away"
        " Weights._own,_seen,changed WholeForward._handles"
    ),
    "a pool": (
        "Allocator._free,_seams Arena.at_close Channel._fds,_of_message"
        " ConditioningCache._entries*,_named,_sent,collected"
        " KeptConditioning._named,_tensors* Mover._buffers*,_laid RankLoop._ahead,_enqueued"
        " RequestHandler._failed,models Segment._registered* Sends._sending* Sent.recent SequenceComm._by_width"
        " Session.leaving,models,owed,tickets Comparison._known Ring._works ShardGather._works StageLink._posted*,_unchecked"
        " StopFlag._later Trail._places"
    ),
    "ComfyUI or a worker": (
        "Auto._others Counts._begun"
        " QueueLookahead._differing,_done*,_kept*,_useless OpaqueAttention._notes"
        " Planning._choices,_plans,_runs Residency._uses,models*"
        " Runs._sampled,recent* Runtime._pools Seam._ours,_stock"
        " Sessions.at_close"
        " StageBalance._seconds* Switch._last _tell_of_sage alike cut_latent"
        " figures"
        " opaque_attention operation reasons tell_uncompiled tell_unrecorded words_of_class"
    ),
    "a count, in a process of its own": (
        "DeviceCounts.moved CountedMemory._known,_storages QuickFakeMode._returned"
        " Recorder.attended,before,tokens,told operation_kind"
    ),
}


def named():
    """The names of ``LIFETIMES``, ``Class.name``, with their stars."""
    for kept in " ".join(LIFETIMES.values()).split():
        of, dot, names = kept.partition(".")
        yield from (f"{of}{dot}{name}" for name in names.split(","))


def bytes_held():
    return (name.rstrip("*") for name in named() if name.endswith("*"))


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
