"""One worker slot: a place for a worker, filled again whenever its worker ends.

slots           `Slots`: how many there are, those that are leaving
slot            `Slot`: its worker is started again whenever it has ended
life            `Life`: one worker, its start, its messages, its end
lives           the living workers: what the dispatcher asks of them
response_limit  whether a worker is past its response limit
health_watch    asks a worker whether it is well
restart_policy  when a worker that ended is started again
first_load      how many versions load for the first time at once
hang_report     what a worker was doing when its time was up
"""
