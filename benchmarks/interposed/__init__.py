"""What `benchmarks.interposer` puts on the path of a server's processes."""
