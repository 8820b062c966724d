// A few threads that run the chunks of one phase after another.
//
// A phase is a number of chunks; whoever is free claims the next. So a worker that the system has
// taken off its core delays nobody: the others do its share. The caller works too, and `run` returns
// when every chunk is done. Which thread computes a chunk never changes what it computes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace quadriga {

static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  Pool() = default;

  // Delegated: where one more cannot be started, the destructor ends those that were.
  explicit Pool(int threads) : Pool() {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }

  ~Pool() {
    stopping_.store(true);
    publish(0);
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Call body(0) … body(count - 1), in any order and on any of the threads.
  template <typename Body>
  void run(int64_t count, const Body& body) {
    if (workers_.empty() || count == 1) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    for (int64_t start = 0; start < count; start += kMaxChunks) {
      const int64_t now = count - start < kMaxChunks ? count - start : kMaxChunks;
      auto shifted = [&](int64_t i) { body(start + i); };
      invoke_ = [](const void* self, int64_t i) {
        (*static_cast<const decltype(shifted)*>(self))(i);
      };
      body_ = &shifted;
      done_.store(0, std::memory_order_relaxed);
      publish(static_cast<uint64_t>(now));
      while (claim_one()) {
      }
      // Chunks still under way elsewhere are short; yield only if their thread lost its core.
      for (int64_t spins = 0; done_.load(std::memory_order_acquire) < now; ++spins)
        spins < kSpinsBeforeYield ? relax() : std::this_thread::yield();
    }
  }

 private:
  static constexpr int64_t kMaxChunks = 0xFFFF;
  static constexpr int64_t kSpinsBeforeYield = 4000;
  static constexpr int64_t kSpinsBeforeSleep = 6000;  // a few 100 µs: the gap between two steps

  // Ticket: phase number (32 bits) | chunks in the phase (16) | next chunk (16).
  void publish(uint64_t count) {
    ++phase_;
    ticket_.store(static_cast<uint64_t>(phase_) << 32 | count << 16, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      bell_.store(phase_, std::memory_order_seq_cst);
      bell_.notify_all();
    }
  }

  // A successful claim keeps its phase open until the chunk is done, so body_ is the right one.
  bool claim_one() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t next = ticket & 0xFFFF, count = ticket >> 16 & 0xFFFF;
      if (next >= count) return false;
      if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
        invoke_(body_, static_cast<int64_t>(next));
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void work() {
    int64_t idle = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
      if (claim_one()) {
        idle = 0;
      } else if (++idle < kSpinsBeforeSleep) {
        relax();
      } else {
        sleep();
        idle = 0;
      }
    }
  }

  // Announce the sleep before looking for work once more: either this sees the new phase, or
  // `publish` sees the sleeper.
  void sleep() {
    const uint32_t bell = bell_.load(std::memory_order_seq_cst);
    const uint64_t before = ticket_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    const bool has_work = (ticket & 0xFFFF) < (ticket >> 16 & 0xFFFF) || ticket != before;
    if (!has_work && !stopping_.load(std::memory_order_seq_cst)) bell_.wait(bell);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> bell_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  uint32_t phase_ = 0;
  void (*invoke_)(const void*, int64_t) = nullptr;
  const void* body_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace quadriga
