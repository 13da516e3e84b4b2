// What TSan watches: several callers of parallel_for at once, from outside and from within, with
// pauses in which the helpers fall asleep.  Prints nothing if every item was done exactly once.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "threads.h"

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "threads: %s\n", what);
  std::exit(1);
}

void caller(int seed) {
  for (int round = 0; round < 4000; ++round) {
    const int n = (seed * 37 + round * 11) % 200;
    std::vector<int> done(n, 0);  // not atomic: each item is one thread's
    infer::parallel_for(n, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) ++done[i];
      std::atomic<int> inner{0};
      infer::parallel_for(5, [&](int b, int e) { inner += e - b; });
      check(inner == 5, "a call from inside lost items");
    });
    for (int count : done) check(count == 1, "an item was not done exactly once");
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

int main() {
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back(caller, i);
  for (std::thread& t : callers) t.join();
  std::_Exit(0);  // the pool's helpers live on
}
