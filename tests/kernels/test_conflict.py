"""The Hugging Face package of the same name beside ours: noticed, and refused in clear words."""

import pytest

from kernels.conflict import KernelsConflict, ensure_no_conflict


def test_nothing_is_said_without_the_other_package():
    ensure_no_conflict()


def test_the_other_package_is_refused(tmp_path, monkeypatch):
    info = tmp_path / "kernels-0.10.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.10.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KernelsConflict, match=r"'kernels' \(0.10.1\) is installed.*pip uninstall kernels"):
        ensure_no_conflict()
