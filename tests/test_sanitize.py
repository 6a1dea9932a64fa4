"""tests/sanitize.py reads what compute-sanitizer says: here a script stands in for it."""

import sys

import pytest
import sanitize


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(*lines, status): compute-sanitizer writes these lines into its log, and ends."""
    program = tmp_path / "compute-sanitizer"

    def write(*lines, status=0):
        program.write_text(
            f"#!{sys.executable}\n"
            "import sys\n"
            "log = next(a for a in sys.argv if a.startswith('--log-file=')).split('=', 1)[1]\n"
            f"open(log, 'w').write({chr(10).join(lines)!r})\n"
            "print('2 passed in 0.01s')\n"
            f"sys.exit({status})\n"
        )
        program.chmod(0o755)

    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(program))
    return write


@pytest.mark.parametrize(
    "lines, findings",
    [
        (["========= ERROR SUMMARY: 0 errors"], 0),
        (["========= ERROR SUMMARY: 2 errors", "========= ERROR SUMMARY: 1 error"], 3),
        (["========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)"], 4),
        (["========= COMPUTE-SANITIZER"], None),
    ],
)
def test_findings_of_all_processes_are_added(stand_in, lines, findings):
    stand_in(*lines)
    result = sanitize.check("racecheck", "tests/ops", 1, 60.0)
    assert result["findings"] == findings
    assert result["passed"]
    assert result["ended"] == "2 passed in 0.01s"


def test_a_failed_test_is_no_success(stand_in, monkeypatch, capsys):
    stand_in("========= ERROR SUMMARY: 0 errors", status=1)
    monkeypatch.setattr(
        sys, "argv", ["sanitize", "--tool", "memcheck", "--tests", "tests/ops/test_segments.py"]
    )
    assert sanitize.main() == 1
    assert "0 findings" in capsys.readouterr().out
