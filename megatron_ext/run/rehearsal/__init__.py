"""Runs any rank's step of any number of GPUs on a CPU: real code, tensors without memory, groups without others."""
