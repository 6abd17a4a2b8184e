"""Stands for `sklearn.datasets`: reads the digits that are installed."""

import importlib.metadata

import numpy as np


def load_digits(*, return_X_y):
  """Returns images and labels."""
  assert return_X_y
  files = importlib.metadata.distribution('scikit-learn')
  path = files.locate_file('sklearn/datasets/data/digits.csv.gz')
  table = np.loadtxt(str(path), delimiter=',')
  return table[:, :-1], table[:, -1].astype(int)
