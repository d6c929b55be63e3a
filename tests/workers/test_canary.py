"""The day that stock Keras trains on many workers, this turns red and the mend can go."""

import os
import pathlib

import pytest

from local_cluster import LocalCluster, WorkerFailed

STOCK = """
import sys
import numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensors((np.ones((4, 4), "float32"), np.ones((4, 1), "float32"))).repeat(4)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
model.fit(data.with_options(options), verbose=0)
print("stock fit works")
"""


@pytest.mark.xfail(reason="keras-team/keras#20585: Keras 3's fit fails under MWMS", strict=True, raises=WorkerFailed)
@pytest.mark.skipif(os.environ.get("TF_USE_LEGACY_KERAS") == "1", reason="tf_keras's own fit works")
def test_stock_keras_fit_works_under_multi_worker_mirrored_strategy(tmp_path):
    script = pathlib.Path(tmp_path, "stock.py")
    script.write_text(STOCK)
    with LocalCluster(script) as cluster:
        try:
            cluster.wait(deadline=60)
        except WorkerFailed:
            assert "PerReplica" in cluster.log(0) + cluster.log(1), f"another failure: {cluster.log(0)[-2000:]}"
            raise
        assert "stock fit works" in cluster.log(0)
