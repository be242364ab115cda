"""Many logs as one."""

from pathlib import Path

from pegahpc.launch.merged_logs import Line, merged


def put(folder: Path, name: str, text: str) -> None:
    (folder / "logs").mkdir(exist_ok=True)
    with open(folder / "logs" / name, "a") as file:
        file.write(text)


def test_lines_are_in_order_of_time_and_a_traceback_stays_with_its_line(tmp_path: Path) -> None:
    put(tmp_path, "rank-0.log", "2026-12-01T06:00:00.002 INFO a: second\nTraceback\n  deep\n")
    put(tmp_path, "gateway.log", "2026-12-01 06:00:00,001 gateway INFO b: first\n2026-12-01 06:00:00,003 third\n")
    assert [(line.who, line.text.split()[-1]) for line in merged(tmp_path, last=None)] == [
        ("gateway", "first"),
        ("rank-0", "second"),
        ("rank-0", "Traceback"),
        ("rank-0", "deep"),
        ("gateway", "third"),
    ]
    assert [line.text for line in merged(tmp_path, last=2)] == ["  deep", "2026-12-01 06:00:00,003 third"]
    assert list(merged(tmp_path, last=0)) == []


def test_a_fleet_that_never_started_has_no_lines(tmp_path: Path) -> None:
    assert list(merged(tmp_path, last=None)) == []


def test_following_yields_what_comes_later_and_new_files_once_their_lines_are_whole(tmp_path: Path) -> None:
    put(tmp_path, "a.log", "old\nhal")
    changes = [("a.log", "f\n"), ("b.log", "new\n")]

    def is_live() -> bool:
        if not changes:
            return False
        put(tmp_path, *changes.pop(0))
        return True

    assert list(merged(tmp_path, last=None, is_live=is_live)) == [
        Line("", "a", "old"),
        Line("", "a", "half"),
        Line("", "b", "new"),
    ]
