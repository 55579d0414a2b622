"""The archive: a whole store in its bucket, at most an interval old (A4 to A13). docs/disaster-recovery.md has its promises.

`format.py` has the objects, `queue.py` and `recorder.py` what is handed over by those who write, `archiver.py` the thread that
ships it, `chain.py` and `replay.py` the way back.
"""
