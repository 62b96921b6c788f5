"""Rows of different numbers per image, against lists."""

import pytest
import torch

from cldetr.layers.ragged import pad_rows, row_indices


@pytest.mark.parametrize("counts", [[3, 0, 1, 2], [0, 0], [2], [0, 4]])
def test_rows_lie_where_their_image_and_number_say(counts):
    parts = [torch.rand(count, 2) for count in counts]
    images, indices = row_indices(counts, torch.device("cpu"))
    assert [(int(a), int(b)) for a, b in zip(images, indices, strict=True)] == [
        (image, index) for image, count in enumerate(counts) for index in range(count)
    ]
    padded = pad_rows(torch.cat(parts), images, indices, counts)
    wanted = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    assert torch.equal(padded, wanted)
