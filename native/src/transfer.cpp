#include "ssdtune/transfer.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace ssdtune {

Next advance(Request& request, std::int64_t result) {
  if (result == -EINTR) return Next::again;
  if (result == -EAGAIN && request.busy < kBusyRetries) {
    ++request.busy;
    return Next::later;
  }
  if (result < 0) {
    request.error = static_cast<int>(-result);
    return Next::finished;
  }
  const std::size_t stop = request.position + static_cast<std::size_t>(result);
  if (stop <= request.reached) {  // no progress: the end of the file, or a write that does nothing
    request.error = request.transfer->write ? EIO : 0;
    return Next::finished;
  }
  request.busy = 0;
  request.reached = stop;
  // Direct I/O must start aligned, so the odd bytes are moved again. At the end of a file that
  // shows no progress.
  request.position = request.transfer->direct ? stop / kAlignment * kAlignment : stop;
  return stop == request.end ? Next::finished : Next::again;
}

void TransferQueue::take(Request& request) {
  std::shared_ptr<Transfer> transfer = std::move(active_.front());
  active_.pop_front();
  const std::size_t start = transfer->issued;
  const std::size_t end = std::min(start + request_bytes_, transfer->memory.size());
  transfer->issued = end;
  ++transfer->requests;
  if (end < transfer->memory.size()) active_.push_back(transfer);
  request =
      Request{.transfer = std::move(transfer), .position = start, .reached = start, .end = end};
}

bool TransferQueue::finish(Request& request) {
  Transfer& transfer = *request.transfer;
  --transfer.requests;
  if (request.reached < request.end) {
    // All requests before this one were handed out too, so the lowest stop is the end of the
    // gapless part.
    transfer.outcome.moved = std::min(transfer.outcome.moved, request.reached);
    if (transfer.outcome.error == 0) transfer.outcome.error = request.error;
    if (transfer.issued < transfer.memory.size()) {
      transfer.issued = transfer.memory.size();  // hand out no more of it
      std::erase(active_, request.transfer);
    }
  }
  if (transfer.requests == 0 && transfer.issued == transfer.memory.size()) transfer.finished = true;
  const bool finished = transfer.finished;
  request = Request{};
  return finished;
}

}  // namespace ssdtune
