window.BENCHMARK_DATA = {
  "lastUpdate": 1735819200000,
  "repoUrl": "https://github.com/octo/planted",
  "entries": {
    "Python Benchmark": [
      {
        "commit": {"author": {"email": "a@b", "name": "A", "username": "a"}, "committer": {"email": "a@b", "name": "A", "username": "a"}, "distinct": true, "id": "1111111111111111111111111111111111111111", "message": "one", "timestamp": "2025-01-01T10:00:00+02:00", "tree_id": "f", "url": "https://github.com/octo/planted/commit/1111111111111111111111111111111111111111"},
        "date": 1735732800000,
        "tool": "pytest",
        "benches": [
          {"name": "bench.py::test_fib_10", "value": 41513.3, "unit": "iter/sec", "range": "stddev: 0.000005", "extra": "mean: 24.1 usec\nrounds: 26267"},
          {"name": "bench.py::test_fib[a/b, \"c\"]", "value": 99, "unit": "iter/sec", "range": "stddev: 1", "extra": ""}
        ]
      },
      {
        "commit": {"author": {}, "committer": {}, "id": "2222222222222222222222222222222222222222", "message": "two", "timestamp": "2025-01-02T10:00:00Z", "url": ""},
        "date": 1735819200000,
        "tool": "pytest",
        "benches": [{"name": "bench.py::test_fib_10", "value": null, "unit": "iter/sec"}]
      }
    ],
    "Go Benchmark": [
      {
        "commit": {"author": {}, "committer": {}, "id": "2222222222222222222222222222222222222222", "message": "two", "timestamp": "2025-01-02T10:00:00Z", "url": ""},
        "date": 1735819200000,
        "tool": "go",
        "benches": [
          {"name": "BenchmarkFib", "value": 10, "unit": "ns/op", "extra": "100 times\n8 procs"},
          {"name": "BenchmarkFib", "value": 14, "unit": "ns/op", "extra": "100 times\n8 procs"},
          {"name": "BenchmarkFib", "value": 11, "unit": "ns/op", "extra": "100 times\n8 procs"}
        ]
      }
    ]
  }
}
