"""This project's own studies of its kernels, generated from committed runs; not in the wheel."""
