"""The lessons' names, in order."""

NAMES = [
    "01_single_worker",
    "02_two_workers",
    "03_sharding",
    "04_saving",
    "05_backup_and_restore",
    "06_performance",
    "07_many_machines",
]
