from absl.testing import parameterized
import jax

import cases
from shard_transforms.facade import devices


class DevicesTest(parameterized.TestCase):

  @cases.parameters('/cpu:1', '/device:CPU:1')
  def test_finds_a_device_by_its_name(self, name):
    self.assertEqual(devices.of_towers(name), [jax.local_devices()[1]])

  def test_all_local_devices_by_default(self):
    self.assertEqual(devices.of_towers(None), jax.local_devices())

  @cases.parameters(
      ([],), (['/cpu:0', '/cpu:0', '/cpu:1'],), (['/cpu:99'],), (['cpu0'],)
  )
  def test_refuses(self, names):
    with self.assertRaisesRegex(ValueError, '`devices` must'):
      devices.of_towers(names)
