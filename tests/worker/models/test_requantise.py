import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType
from gguf.quants import dequantize, quantize

from twinpool.worker.models.requantise import requantise


@pytest.fixture
def files(tiny, tmp_path):
    (tmp_path / "source").write_bytes(tiny.source)
    reports = []
    requantise(tmp_path / "source", tmp_path / "result", lambda *report: reports.append(report))
    return GGUFReader(tmp_path / "source"), GGUFReader(tmp_path / "result"), reports


def test_metadata_stays_but_for_the_file_type(files):
    before, after, _ = files
    assert list(after.fields) == list(before.fields)
    changed = {
        name
        for name, field in before.fields.items()
        if (field.types, field.contents()) != (after.fields[name].types, after.fields[name].contents())
    }
    assert changed == {"general.file_type"}
    assert after.fields["general.file_type"].contents() == LlamaFileType.MOSTLY_Q8_0


def test_tensors_are_what_the_library_makes_of_them(files):
    before, after, _ = files
    assert [(tensor.name, list(tensor.shape)) for tensor in after.tensors] == [
        (tensor.name, list(tensor.shape)) for tensor in before.tensors
    ]
    embedding, norm, matrix = after.tensors
    assert embedding.tensor_type == GGMLQuantizationType.Q8_0
    assert np.array_equal(embedding.data, before.tensors[0].data)
    assert norm.tensor_type == GGMLQuantizationType.F32
    assert np.array_equal(norm.data, before.tensors[1].data)
    exact = dequantize(before.tensors[2].data, GGMLQuantizationType.Q4_1)
    assert matrix.tensor_type == GGMLQuantizationType.Q8_0
    assert np.array_equal(matrix.data, quantize(exact, GGMLQuantizationType.Q8_0))
    # A block's largest value takes 127 steps, so nothing is off by more than half of one (and the scale's rounding).
    step = np.abs(exact.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    error = np.abs(dequantize(matrix.data, GGMLQuantizationType.Q8_0) - exact).reshape(-1, 32)
    assert np.all(error <= 0.6 * step)


def test_progress_reaches_its_end(files):
    _, after, reports = files
    assert len(reports) == 3
    assert reports[-1] == (sum(tensor.n_bytes for tensor in after.tensors),) * 2


def test_an_interrupted_write_leaves_no_open_file(tiny, tmp_path):
    (tmp_path / "source").write_bytes(tiny.source)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        requantise(tmp_path / "source", tmp_path / "result", stop)
