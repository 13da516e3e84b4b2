// One pool of threads for the process.
#pragma once

#include <cstdint>
#include <type_traits>

namespace infer {

// Threads that take part in parallel_for, the caller among them: INFER_NUM_THREADS, or the cores
// that this process may use.
int num_threads();

// While it lives, this thread's floating-point arithmetic is plain IEEE (nearest even, denormals
// kept).  XLA's threads flush denormals and ours do not, so without it a result would depend on
// the thread that computed it.  parallel_for holds one around every piece; code outside of it
// makes its own.
class IeeeMode {
 public:
  IeeeMode();
  ~IeeeMode();
  IeeeMode(const IeeeMode&) = delete;

 private:
  uint32_t before_;
};

namespace detail {
void run(int n, int min_piece, void (*call)(void*, int, int), void* context);
}

// Call f(begin, end) on contiguous pieces that together are [0, n), on up to num_threads() threads
// at once; returns when all are done.  A piece has at least min_piece items (but the last).  Pieces
// are taken as threads become free, so f must give the same result however [0, n) is cut.  A second
// concurrent caller, or a call from inside f, runs everything on its own thread.
template <typename F>
void parallel_for(int n, F&& f, int min_piece = 1) {
  using Function = std::remove_reference_t<F>;
  detail::run(
      n, min_piece,
      [](void* f, int begin, int end) { (*static_cast<Function*>(f))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace infer
