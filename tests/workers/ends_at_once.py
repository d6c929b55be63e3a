"""Imported by the scripts of these tests: the end of TensorFlow's input iterators, so of `fit`, takes no time.

Each iterator has a thread that tunes its pipeline. Between two looks it sleeps for 10, 20, 40 ms and so on, up to a
minute, and at its iterator's end it can miss the call to stop: so many short trainings would take twice as long.
"""

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.data.ops.multi_device_iterator_ops import OwnedMultiDeviceIterator

UNTUNED = tf.data.Options()
UNTUNED.autotune.enabled = False


create, make = multi_device_iterator_ops._create_device_dataset, OwnedMultiDeviceIterator.__init__


def create_untuned(*arguments, **options):
    return create(*arguments, **options).with_options(UNTUNED)


def make_untuned(iterator, dataset=None, *arguments, **options):
    make(iterator, None if dataset is None else dataset.with_options(UNTUNED), *arguments, **options)


multi_device_iterator_ops._create_device_dataset, OwnedMultiDeviceIterator.__init__ = create_untuned, make_untuned
