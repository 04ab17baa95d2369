"""Which tasks of lm-eval are meant by a name or a file, and whether they may run: found out before weights are loaded.

A task is data, save where it brings code: `!function` in a YAML of the user's, `unsafe_code` (tasks that execute what a
model writes), or a metric that is fetched from the hub and executed. These run only with --trust-remote-code. What
lm-eval's own package holds counts as installed. Templates of untrusted tasks are rendered in Jinja's sandbox.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compress.errors import CompressError, MissingResourceError, UsageError
from compress.model.load import quiet_transformers
from compress.recipe.words import did_you_mean

FILES = (".yaml", ".yml")
_CODE_TAGS = ("!function", "tag:yaml.org,2002:python/")
_TRUST = "if you have read that code and trust it, pass --trust-remote-code"
_LOGGERS = ("lm_eval", "datasets", "evaluate", "fsspec", "huggingface_hub", "httpx")


@dataclass(frozen=True)
class LmEvalTasks:
    """Tasks that are loaded with their data and may run.

    Attributes:
        tasks: {name or file as it was asked: its tasks, lm_eval.api.task.Task each}; a group has several.
        trusted: whether code that tasks bring may run.
    """

    tasks: Mapping[str, tuple[Any, ...]]
    trusted: bool


def check_lm_eval(names_or_files: Sequence[str], *, trust_remote_code: bool = False) -> LmEvalTasks:
    """Finds and loads tasks, groups and tags of lm-eval, and task files of the user's.

    Raises:
        UsageError: no such task, a file that is no task, a task that has no right and wrong answers, or one that
            brings code without `trust_remote_code`.
        MissingResourceError: lm-eval, a package that a task needs, a file or the data are not there.
    """
    files = {name: _path(name) for name in names_or_files if _is_file(name)}
    code = [fault for path in files.values() for fault in _code_in_file(path, ())]
    _refuse(code, trust_remote_code)
    with quiet(trusted=trust_remote_code):
        configs = {name: _merged(path) for name, path in files.items()}
        named = len(files) < len(names_or_files) or any(_names_others(config) for config in configs.values())
        manager = _manager(include_defaults=named)
        _check_known(manager, [name for name in names_or_files if name not in files])
        index = manager.task_index
        leaves = {name: list(_leaves(configs[name] if name in files else name, index)) for name in names_or_files}
        _refuse(
            [f"{name}: {fault}" for name, own in leaves.items() for leaf in own for fault in _code_in_config(leaf)],
            trust_remote_code,
        )
        tasks = {name: _loaded(manager, name, files.get(name), configs.get(name, {})) for name in names_or_files}
    return LmEvalTasks(tasks, trust_remote_code)


@contextlib.contextmanager
def quiet(*, trusted: bool) -> Iterator[None]:
    """lm-eval and datasets without logs, prints and progress bars; templates in the sandbox unless trusted."""
    try:
        import datasets
        import lm_eval.api.task
        import lm_eval.utils
        from jinja2.sandbox import SandboxedEnvironment
    except ImportError as error:
        raise MissingResourceError(f"lm-eval cannot be imported ({error})", hint='pip install "lm-eval[hf]"') from error

    environment = lm_eval.utils.env
    sandbox = SandboxedEnvironment(undefined=environment.undefined, keep_trailing_newline=True)
    sandbox.filters.update(environment.filters)
    bars = datasets.are_progress_bars_disabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(quiet_transformers())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for name in _LOGGERS:
            stack.enter_context(_level(logging.getLogger(name), logging.CRITICAL))
        stack.enter_context(_swapped(lm_eval.api.task, "tqdm", lambda items, **_: items))
        if not trusted:
            stack.enter_context(_swapped(lm_eval.utils, "env", sandbox))
        datasets.disable_progress_bars()
        if not bars:
            stack.callback(datasets.enable_progress_bars)
        yield


@contextlib.contextmanager
def _level(logger: logging.Logger, level: int) -> Iterator[None]:
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _swapped(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _is_file(name: str) -> bool:
    return name.lower().endswith(FILES)


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # `~somebody`, a loop of links, a NUL
        raise MissingResourceError(f"the task file {name} cannot be read: {error}") from error


def _manager(*, include_defaults: bool) -> Any:
    """The index of tasks; with lm-eval's own, some 14,000 of them, it takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=include_defaults)


def _code_in_file(path: Path, including: tuple[Path, ...]) -> list[str]:
    """Where a YAML and those it includes name code, as `file:line: ...`."""
    if path in including:
        raise UsageError(f"{path} includes itself")
    node = _composed(path)
    found = [
        f"{path}:{one.start_mark.line + 1}: {one.tag.removeprefix('tag:yaml.org,2002:')} {one.value} is Python code"
        for one in _nodes(node)
        if one.tag.startswith(_CODE_TAGS)
    ]
    for key, value in node.value:
        if key.value == "include":
            names = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for name in names:
                found += _code_in_file((path.parent / str(name.value)).resolve(), (*including, path))
    return found


def _composed(path: Path) -> yaml.MappingNode:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise MissingResourceError(f"the task file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UsageError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply") from error
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{path} is no task of lm-eval, which is a map with `task` or `group`")
    return node


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    """A node and all below it, each once (an alias is the same node again)."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, yaml.MappingNode):
            waiting += [part for pair in one.value for part in pair]
        elif isinstance(one, yaml.SequenceNode):
            waiting += one.value


def _merged(path: Path) -> dict[str, Any]:
    """A task file with what it includes; functions stay names."""
    from lm_eval.tasks._yaml_loader import load_yaml

    with _errors(str(path)):
        config: dict[str, Any] = load_yaml(path, resolve_func=False)
    if not config.keys() & {"task", "group"}:
        raise UsageError(f"{path} is no task of lm-eval: it has neither `task` nor `group`")
    return config


def _check_known(manager: Any, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in manager.task_index]
    if unknown:
        raise UsageError(
            "\n".join(f"lm-eval has no task {name!r}{did_you_mean(name, manager.all_tasks)}" for name in unknown),
            hint="`lm-eval ls tasks` lists them; a task of your own is a .jsonl file or an lm-eval .yaml",
        )


def _leaves(asked: Any, index: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The configs of the single tasks that a name, a config or a member of a group stands for."""
    if depth > 20:
        raise UsageError(f"the group {asked!r} holds itself")
    if isinstance(asked, str):
        entry = index.get(asked)
        members: Any = [] if entry is None else sorted(entry.tags) if entry.cfg is None else [entry.cfg]
    elif not isinstance(asked, Mapping):
        members = []  # lm-eval says what is wrong with it
    elif isinstance(asked.get("task"), list):
        members = asked["task"]
    else:
        yield asked
        name = asked.get("task", asked.get("group"))
        # An entry of a group that names a task of the index changes some of its settings.
        members = [name] if depth and name in index and index[name].cfg is not asked else []
    for member in members:
        yield from _leaves(member, index, depth + 1)


def _code_in_config(config: Mapping[str, Any]) -> list[str]:
    from lm_eval.api.registry import get_metric, metric_registry

    get_metric("acc")  # fills the registry
    name, found = config.get("task"), []
    if config.get("unsafe_code"):
        found.append(f"the task {name} executes code that the model writes")
    listed = config.get("metric_list")
    if config.get("process_results") is None and isinstance(listed, list):
        for entry in listed:
            metric = entry.get("metric") if isinstance(entry, Mapping) else None
            hub = isinstance(metric, str) and not Path(metric).is_absolute() and metric not in metric_registry
            if hub or (isinstance(entry, Mapping) and entry.get("hf_evaluate")):
                found.append(f"the task {name} fetches the metric {metric} from the hub, which is code")
    return found


def _refuse(faults: Sequence[str], trusted: bool) -> None:
    if faults and not trusted:
        raise UsageError("\n".join(dict.fromkeys(faults)), hint=_TRUST)


def _names_others(config: Mapping[str, Any]) -> bool:
    """Whether a file is a group with members that stand elsewhere."""
    members = config.get("task")
    return isinstance(members, list) and any(
        isinstance(one, str) or (isinstance(one, Mapping) and "dataset_path" not in one) for one in members
    )


def _loaded(manager: Any, name: str, path: Path | None, config: Mapping[str, Any]) -> tuple[Any, ...]:
    from lm_eval.tasks._index import Entry, Kind

    spec = name if path is None else str(path)
    with _errors(name):
        if "group" in config:  # lm-eval finds a group by its name only
            spec = str(config["group"])
            manager.task_index[spec] = Entry(spec, Kind.GROUP, path, dict(config))
        tasks = tuple(manager.load([spec])["tasks"].values())
    for task in tasks:
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            raise UsageError(
                f"{name}: {task.task_name} measures perplexity and has no right and wrong answers",
                hint="`evaluate: fidelity` measures perplexity, paired by token",
            )
        if getattr(task, "MULTIMODAL", False):
            raise UsageError(f"{name}: {task.task_name} asks about images or sound, which these models do not read")
        with _errors(name):
            count = len(task.eval_docs)
        if count < 2:
            raise UsageError(f"{name}: {task.task_name} has {count} items; a comparison needs at least 2")
    if not tasks:
        raise UsageError(f"{name} holds no task")
    return tasks


@contextlib.contextmanager
def _errors(name: str) -> Iterator[None]:
    """What lm-eval and datasets raise over a task as one sentence: there is no list of what they may raise."""
    try:
        yield
    except CompressError:
        raise
    except ImportError as error:
        raise MissingResourceError(
            f"{name}: a package that the task needs is not there ({error})", hint="install it with pip"
        ) from error
    except OSError as error:  # also: no such data set, no such file, no connection
        raise MissingResourceError(
            f"{name}: its data cannot be fetched ({_brief(error)})",
            hint="check the connection and `dataset_path`; without a connection the data must be local or in the cache",
        ) from error
    except Exception as error:
        raise UsageError(
            f"{name}: lm-eval cannot use this task ({type(error).__name__}: {_brief(error)})",
            hint="check the task's file against its data: `doc_to_text`, `doc_to_choice`, `doc_to_target`",
        ) from error


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
