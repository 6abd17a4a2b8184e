"""Signatures and constants are those of TensorFlow 1.15: `signatures.json`.

Beside them it has `return_loss` and `has_aux`, which are ours.
"""

import inspect
import json
import operator
import pathlib

from absl.testing import parameterized

import cases
from shard_transforms import facade
from shard_transforms.facade import tf

PATH = pathlib.Path(__file__).with_name('signatures.json')
EXPECTED = json.loads(PATH.read_text(encoding='utf-8'))


class SignaturesTest(parameterized.TestCase):

  @cases.parameters(*EXPECTED['signatures'])
  def test_signature(self, name):
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(
            operator.attrgetter(name)(facade)
        ).parameters.values()
    ]

    actual = str(inspect.Signature(parameters))[1:-1]
    self.assertEqual(actual, EXPECTED['signatures'][name])

  @cases.parameters(*EXPECTED['constants'])
  def test_constants(self, name):
    members = vars(operator.attrgetter(name)(facade)).items()

    actual = {n: v for n, v in members if n.isupper()}
    self.assertEqual(actual, EXPECTED['constants'][name])

  def test_all_reductions_are_valid(self):
    keys = set(EXPECTED['constants']['tf.losses.Reduction'].values())

    self.assertCountEqual(tf.losses.Reduction.all(), keys)
    for key in keys:
      tf.losses.Reduction.validate(key)
