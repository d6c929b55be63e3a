"""Whether Keras 2 is what runs (`make tf_keras`). Imports no TensorFlow."""

import os

import pytest

LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"


def only_keras_3(reason):
    """A mark for tests, with the reason why they are not for Keras 2."""
    return pytest.mark.skipif(LEGACY, reason=reason)
