#include "threads.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "handler.h"

namespace infer {
namespace {

// Long enough to stay awake between the operations of one decoding step, short enough to leave the
// core to others soon after.
constexpr auto kSpin = std::chrono::microseconds(20);
// A thread's share in pieces: more than one, so that a thread that starts late or is interrupted
// holds up the others by less.
constexpr int kPiecesPerThread = 4;
constexpr int kMostThreads = 1024;

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// What is no number from 1 to kMostThreads is refused in Python (infer/native/__init__.py); here it
// counts as not set.
int threads_from_environment() {
  const char* text = std::getenv("INFER_NUM_THREADS");
  if (text == nullptr) return usable_cores();
  int n = 0;
  for (; '0' <= *text && *text <= '9' && n <= kMostThreads; ++text) n = 10 * n + (*text - '0');
  return *text == '\0' && 1 <= n && n <= kMostThreads ? n : usable_cores();
}

// One job at a time.  `state_` is the job's number above the count of its unclaimed pieces, so that
// a helper claims with one compare-and-swap and can never claim from a job that has ended: its
// caller waits until all pieces are done, claimed ones too.  A helper that sleeps claims nothing
// and delays nobody.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) {
      try {
        std::thread([this] { help(); }).detach();
      } catch (const std::system_error&) {
        break;  // no more threads to be had: the pieces are done by fewer
      }
      ++helpers_;
    }
  }

  void run(int n, int pieces, void (*call)(void*, int, int), void* context) {
    if (helpers_ == 0 || pieces < 2 || busy_.exchange(true, std::memory_order_acquire)) {
      IeeeMode mode;
      call(context, 0, n);
      return;
    }
    n_ = n;
    pieces_ = pieces;
    call_ = call;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(job << 32 | static_cast<uint32_t>(pieces), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    work();
    for (int spins = 0; done_.load(std::memory_order_acquire) != pieces; ++spins) {
      // A helper that holds a piece may have lost its core to somebody.
      spins < 4000 ? _mm_pause() : static_cast<void>(sched_yield());
    }
    busy_.store(false, std::memory_order_release);
  }

 private:
  // Claim and do pieces until none is left; returns whether there was one.
  bool work() {
    bool any = false;
    uint64_t state = state_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(state) != 0) {
      if (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel)) continue;
      // Claimed: the job cannot end before done_ counts this piece, so its fields hold still.
      const int64_t left = static_cast<uint32_t>(state);
      const int64_t piece = pieces_ - left;
      {
        IeeeMode mode;
        call_(context_, static_cast<int>(n_ * piece / pieces_),
              static_cast<int>(n_ * (piece + 1) / pieces_));
      }
      done_.fetch_add(1, std::memory_order_release);
      any = true;
      state = state_.load(std::memory_order_acquire);
    }
    return any;
  }

  bool has_work() const { return static_cast<uint32_t>(state_.load()) != 0; }

  [[noreturn]] void help() {
    using Clock = std::chrono::steady_clock;
    auto idle_since = Clock::now();
    for (;;) {
      if (work()) {
        idle_since = Clock::now();
        continue;
      }
      for (int i = 0; i < 32; ++i) _mm_pause();
      if (Clock::now() - idle_since < kSpin) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      // Counted before the last look (both sequentially consistent): either this look sees the job
      // or the job's caller sees the sleeper.
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [this] { return has_work(); });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      idle_since = Clock::now();
    }
  }

  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  int helpers_ = 0;
  // The job.
  int64_t n_ = 0;
  int64_t pieces_ = 0;
  void (*call_)(void*, int, int) = nullptr;
  void* context_ = nullptr;
};

std::atomic<Pool*> the_pool{nullptr};
std::mutex pool_mutex;

Pool& pool() {
  if (Pool* made = the_pool.load(std::memory_order_acquire)) return *made;
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (the_pool.load() == nullptr) {
    // A forked child has none of the helpers, and maybe a held lock: it starts with a new pool.
    static const int registered = pthread_atfork([] { pool_mutex.lock(); },
                                                 [] { pool_mutex.unlock(); },
                                                 [] {
                                                   the_pool.store(nullptr);
                                                   pool_mutex.unlock();
                                                 });
    (void)registered;
    the_pool.store(new Pool(num_threads()), std::memory_order_release);  // lives to the end
  }
  return *the_pool.load();
}

}  // namespace

int num_threads() {
  static const int n = threads_from_environment();
  return n;
}

IeeeMode::IeeeMode() : before_(_mm_getcsr()) {
  constexpr uint32_t kIeee = 0x1f80;  // the reset value: exceptions masked, nearest even
  if (before_ != kIeee) _mm_setcsr(kIeee);
}

IeeeMode::~IeeeMode() { _mm_setcsr(before_); }

void detail::run(int n, int min_piece, void (*call)(void*, int, int), void* context) {
  if (n <= 0) return;
  const int most = std::max(1, n / std::max(1, min_piece));
  pool().run(n, std::min(most, num_threads() * kPiecesPerThread), call, context);
}

}  // namespace infer

extern "C" INFER_EXPORT int infer_native_num_threads() { return infer::num_threads(); }
