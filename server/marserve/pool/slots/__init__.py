"""One worker slot: a place for a worker, filled again whenever its worker ends.

slot            `Slot` and the `Life` of each worker in it; the only file that ends a worker
restart_policy  when a worker that ended is started again
first_load      how many versions load for the first time at once
hang_report     what a worker was doing when its time was up
"""
