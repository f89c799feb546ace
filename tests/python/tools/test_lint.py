# SPDX-License-Identifier: Apache-2.0
import json
import sys

import pytest

import lint
import run_clang_tidy


def test_output_of_a_failed_check_is_shown_and_of_a_passed_one_not(capsys):
    code = "import sys; print('finding'); sys.exit(int(sys.argv[1]))"
    assert lint.run("check", [sys.executable, "-c", code, "0"])
    assert "finding" not in capsys.readouterr().out
    assert not lint.run("check", [sys.executable, "-c", code, "1"])
    assert "finding" in capsys.readouterr().out
    assert lint.run("check", [sys.executable, "-c", "print('x\\nleft out: 3 files')"])
    assert capsys.readouterr().out.splitlines()[1:] == ["left out: 3 files"]


def test_a_missing_tool_fails_and_says_how_to_get_it(capsys):
    assert not lint.run("check", ["no-such-linter-here"])
    assert "no-such-linter-here is not installed" in capsys.readouterr().out


def test_a_missing_tool_of_an_optional_check_is_named_and_fails_nothing(capsys):
    assert lint.run("doxygen", ["no-such-linter-here"])
    assert "left out: no-such-linter-here is not installed" in capsys.readouterr().out


def test_single_checks_run_by_name(monkeypatch, capsys):
    monkeypatch.setattr(lint, "commands", lambda *_: {"a": [sys.executable, "-c", ""], "b": ["no"]})
    monkeypatch.setattr(sys, "argv", ["lint.py", "--build-dir", "build", "--only", "a"])
    assert lint.main() == 0
    assert "1 of 1 checks passed" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["lint.py", "--build-dir", "build", "--only", "c"])
    with pytest.raises(SystemExit):
        lint.main()
    assert "--only: expected one of a, b, got c" in capsys.readouterr().err


def test_every_linter_is_given_our_files(tmp_path):
    commands = lint.commands(tmp_path, jobs=1, minutes=None)
    assert "src/core/build_info.cpp" in commands["clang-format"]
    assert "CMakeLists.txt" in commands["gersemi"]
    assert "tools/setup_system.sh" in commands["shellcheck"]


def test_clang_tidy_result_depends_on_our_headers_and_configuration(monkeypatch, tmp_path):
    for name in (".clang-tidy", "a.h"):
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(run_clang_tidy, "ROOT", tmp_path)
    tool = tmp_path / "clang-tidy"
    tool.write_text("#!/bin/sh\necho version\n")
    tool.chmod(0o755)
    digests = {run_clang_tidy.common_digest(str(tool))}
    for name in (".clang-tidy", "a.h"):
        (tmp_path / name).write_text("two")
        digests.add(run_clang_tidy.common_digest(str(tool)))
    assert len(digests) == 3


@pytest.fixture
def three_sources(monkeypatch, tmp_path):
    """Sources of which b.cpp was changed, and a clang-tidy that finds something in c.cpp."""
    sources = [tmp_path / name for name in ("a.cpp", "b.cpp", "c.cpp")]
    for path in sources:
        path.touch()
    read = []

    def check(clang_tidy, database, path):  # noqa: ARG001
        read.append(path.name)
        return "finding" if path.name == "c.cpp" else ""

    monkeypatch.setattr(run_clang_tidy, "ROOT", tmp_path)
    monkeypatch.setattr(run_clang_tidy, "tool", lambda name: name)
    monkeypatch.setattr(run_clang_tidy, "common_digest", lambda _: b"")
    monkeypatch.setattr(run_clang_tidy, "compile_commands", lambda _: [])
    monkeypatch.setattr(run_clang_tidy, "sources", lambda _: sources)
    monkeypatch.setattr(run_clang_tidy, "check", check)
    monkeypatch.setattr(run_clang_tidy.suite_parts, "changed", lambda: ["b.cpp", "gone.cpp"])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["", "--build-dir", str(tmp_path), *arguments])
        read.clear()
        return run_clang_tidy.main(), list(read)

    return run


def test_clang_tidy_reads_what_changed_first_and_again_only_what_failed(three_sources, capsys):
    assert three_sources("--jobs", "1") == (1, ["b.cpp", "a.cpp", "c.cpp"])
    assert capsys.readouterr().out == "finding\n"
    assert three_sources("--jobs", "1") == (1, ["c.cpp"])


def test_clang_tidy_names_what_it_had_no_time_for_and_has_not_passed_it(three_sources, capsys):
    assert three_sources("--jobs", "1", "--minutes", "0") == (0, [])
    assert "left out, for want of time: 3 of 3 files\n" in capsys.readouterr().out
    assert three_sources("--jobs", "1", "--minutes", "9") == (1, ["b.cpp", "a.cpp", "c.cpp"])


def test_clang_tidy_gets_no_options_that_only_gcc_has(tmp_path):
    gcc = "--param=ggc-min-heapsize=1 -O3 -Winvalid-pch -include /b/a.dir/cmake_pch.hxx"
    entry = {"file": "a.cpp", "command": f"c++ -DA {gcc} -include own.h -c a.cpp"}
    (tmp_path / "compile_commands.json").write_text(json.dumps([entry]))
    (command,) = run_clang_tidy.compile_commands(tmp_path)
    assert command["command"] == "c++ -DA -O3 -include own.h -c a.cpp"


def test_clang_tidy_reads_each_of_the_sources_that_are_compiled_together(tmp_path):
    together = tmp_path / "a.dir" / "Unity" / "unity_0_cxx.cxx"
    together.parent.mkdir(parents=True)
    sources = [tmp_path / "one.cpp", tmp_path / "two.cpp"]
    together.write_text("".join(f'/* x */\n#include "{path}"\n' for path in sources))
    entries = [
        {"file": str(together), "command": f"c++ -DA -o {together}.o -c {together}"},
        {"file": str(sources[0]), "command": f"c++ -DB -c {sources[0]}"},  # another target
    ]
    (tmp_path / "compile_commands.json").write_text(json.dumps(entries))
    commands = run_clang_tidy.compile_commands(tmp_path)
    assert [entry["file"] for entry in commands] == [str(path) for path in sources]
    for entry, path in zip(commands, sources, strict=True):
        assert entry["command"] == f"c++ -DA -o {path}.o -c {path}"
    database = run_clang_tidy.write_database(tmp_path, commands) / "compile_commands.json"
    assert json.loads(database.read_text()) == commands
