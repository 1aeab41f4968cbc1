// Threads that call pread and pwrite: works everywhere.
#pragma once

#include <thread>
#include <vector>

#include "ssdtune/engine.h"

namespace ssdtune {

class ThreadEngine final : public Engine {
 public:
  // One thread per request in flight, but no more than this.
  static constexpr unsigned kMaxThreads = 64;

  explicit ThreadEngine(Options options);
  ~ThreadEngine() override { close(); }
  void close() override;

 private:
  void wake() override { work_.notify_all(); }
  void run();
  void move(Request& request) const;

  std::condition_variable work_;
  std::vector<std::thread> threads_;
};

}  // namespace ssdtune
