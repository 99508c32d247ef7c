"""A trainer for sharded models that saves to any object store and resumes at any world size."""
