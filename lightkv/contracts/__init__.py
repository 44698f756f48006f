"""Other projects' interfaces over lightkv's memory and kernels: adapters, one folder or file for each."""
