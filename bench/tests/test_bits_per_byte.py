"""Bits per byte against the definition: every byte once, only from bytes before it."""

import itertools
import math

import pytest
import torch

from bench.bits_per_byte import BYTE_OFFSET, bits_per_byte, encode, windows


@pytest.mark.parametrize("length", [1, 5, 64, 100, 777])
@pytest.mark.parametrize("window, stride", [(1, 1), (8, 8), (8, 3), (64, 48)])
def test_windows_score_each_byte_once(length, window, stride):
    window = min(window, length)
    scored = [start + i for start, first in windows(length, window, min(stride, window)) for i in range(first, window)]
    assert scored == list(range(length))


class Copier(torch.nn.Module):
    """Gives the byte that it last read probability 1/2, all others share the rest."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 384)
        logits.scatter_(2, input_ids.unsqueeze(-1), math.log(383))
        return type("Out", (), {"logits": logits})


def test_against_a_model_whose_loss_is_known():
    text = b"aabbbbcc" * 40
    repeats = sum(a == b for a, b in itertools.pairwise(text))
    want = (repeats * 1 + (len(text) - repeats) * math.log2(2 * 383)) / len(text)
    for window, stride in ((512, 384), (32, 8), (7, 7)):
        assert bits_per_byte(Copier(), text, window=window, stride=stride) == pytest.approx(want, rel=1e-5)


def test_encode_is_the_bytes():
    assert encode(b"\x00A\xff").tolist() == [BYTE_OFFSET, 65 + BYTE_OFFSET, 255 + BYTE_OFFSET]
