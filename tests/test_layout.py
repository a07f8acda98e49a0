"""The house rules, read from the source: who imports whom, one home for each heavy package, sizes, words."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("heads", "data", "train", "eval", "launch")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

MAY_IMPORT = {
    "heads": {"heads"},
    "data": {"data", "heads"},
    "train": {"train", "data", "heads"},
    "eval": {"eval", "data", "heads"},
    "launch": set(FOLDERS),
}
HOMES = {
    "deepspeed": ("train/engine.py",),
    "wandb": ("train/log.py",),
    "vllm": ("data/engine_worker.py", "data/engine_measure.py", "data/vllm_connector.py", "eval/vllm_plugin/"),
    "transformers": ("data/chat.py", "data/forward.py", "data/target_config.py"),
    "datasets": ("data/prompts.py",),
    "compressed_tensors": ("eval/quantize.py",),
    "openai": ("data/remote.py",),
    "hydra": ("train/config.py", "launch/"),
    "omegaconf": ("train/config.py", "launch/"),
}
FILE_LINES, FUNCTION_LINES = 300, 60
SMALLER = {"heads/base.py": 120, "train/loop.py": 120}
# Another word for the target or the head, a path of somebody's machine.
FORBIDDEN = re.compile(r"\b(verifier|base[ _]model|big[ _]model|speculator)s?\b|/home/|/root/|/work/|/Users/", re.IGNORECASE)


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """(dotted module, whether it is imported for annotations alone: inside `if TYPE_CHECKING:`)."""
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [(f"{node.module}", id(node) in typing_only)]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_one_way(name):
    folder = name.partition("/")[0]
    for module, typing_only in imports(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        top = module.partition(".")[0]
        if top in FOLDERS and not (typing_only and module == "train.config"):
            assert top in MAY_IMPORT[folder], f"{name} imports {module}"


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("heads/")])
def test_heads_are_pure_torch(name):
    for module, _ in imports(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        top = module.partition(".")[0]
        assert top in {"torch", "heads"} | sys.stdlib_module_names, f"{name} imports {module}"


@pytest.mark.parametrize("name", NAMES)
def test_heavy_packages_have_one_home(name):
    for module, _ in imports(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        homes = HOMES.get(module.partition(".")[0])
        assert homes is None or name.startswith(homes), f"{name} imports {module}, whose home is {', '.join(homes)}"


@pytest.mark.parametrize("name", NAMES)
def test_size_budget(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    limit = SMALLER.get(name, 40 if name.startswith("launch/") else 250 if name.startswith("heads/") else FILE_LINES)
    assert len(text.splitlines()) <= limit, f"{name} has more than {limit} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES, f"{name}: {node.name} has more than {FUNCTION_LINES} lines"


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("launch/")])
def test_launch_scripts_find_the_repository_first(name):
    """Else `import train` finds launch/train.py: a script's own folder comes first on sys.path."""
    text = (ROOT / name).read_text(encoding="utf-8")
    first_own = re.search(rf"^from ({'|'.join(FOLDERS)})\b", text, re.MULTILINE)
    insert = text.find("sys.path.insert(0, ")
    assert insert >= 0 and (first_own is None or insert < first_own.start())
    assert ast.get_docstring(ast.parse(text)), "says what it is for"


@pytest.mark.parametrize("name", NAMES)
def test_words_and_paths(name):
    found = FORBIDDEN.search((ROOT / name).read_text(encoding="utf-8"))
    assert found is None, f"{name}: `{found[0]}`"


def test_artifacts_are_ignored_and_code_is_not():
    """A template that ignores data/ would leave half of the library out of the repository."""

    def ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode == 0

    if not (ROOT / ".git").exists():  # an archive of the source: nothing to ask
        return
    assert not any(ignored(name) for name in [*NAMES, "data/promptset/chat.jsonl", "conf/data/smollm.yaml"])
    assert all(ignored(path) for path in ("store/x/shard-00000.safetensors", "runs/x/latest", ".venv/bin/python", "wandb/x"))


def test_tests_are_flat():
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert all(path.parent == ROOT / "tests" for path in (ROOT / "tests").rglob("test_*.py"))
