// One thread that keeps a driver's queue full.
#pragma once

#include <thread>
#include <vector>

#include "ssdtune/driver.h"

namespace ssdtune {

class RingEngine final : public Engine {
 public:
  RingEngine(Options options, std::unique_ptr<Driver> driver);
  ~RingEngine() override { close(); }
  void close() override;

 private:
  void wake() override;
  void run();
  void push(std::uint64_t slot);
  void digest(const Completion& completion);
  void pause(bool briefly);

  Descriptor event_;  // signalled by new work and by completions alike
  std::unique_ptr<Driver> driver_;
  // Of the engine thread alone:
  std::vector<Request> slots_;
  std::vector<std::uint64_t> free_slots_;
  std::vector<std::uint64_t> fresh_;  // taken from the queue, not yet pushed
  std::vector<std::uint64_t> later_;  // to be tried again in a millisecond
  std::vector<Completion> failed_;    // completed by a fault instead of the driver
  std::vector<Completion> completions_;
  std::thread thread_;
};

}  // namespace ssdtune
