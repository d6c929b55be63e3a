"""Clusters, and what a strategy knows of its own, for tests without any second process."""

from types import SimpleNamespace

import tensorflow as tf

TWO = {"worker": ["127.0.0.1:21111", "127.0.0.1:21112"]}
WITH_CHIEF = {"chief": ["127.0.0.1:21111"], "worker": ["127.0.0.1:21112", "127.0.0.1:21113"]}


def strategy_of(cluster, job, index):
    """As much of a strategy as tells which task of which cluster this is."""
    spec = tf.train.ClusterSpec(cluster)
    return SimpleNamespace(cluster_resolver=SimpleNamespace(cluster_spec=lambda: spec, task_type=job, task_id=index))
