"""A CUDA device that is not there and carries numbers: host memory behind torch's own CUDA dispatch key.

``loading`` puts it into a process before torch looks for devices, ``device`` answers for ``torch.cuda``, ``kernels``
has references of what only CUDA computes, ``recording`` has streams and graphs, ``report`` counts a whole command.
"""
