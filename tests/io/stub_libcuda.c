// Stands in for NVIDIA's driver (libcuda.so.1) where there is no GPU, so that the real kvikio works
// in its compatibility mode. It knows one device. "Device memory" is host memory that is mapped
// twice: the address that is handed out cannot be touched (a program that takes it for host memory
// dies), the copies use the other.
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uintptr_t Address;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, MOST = 256 };
static struct {
  char *base, *shadow;
  size_t size;
} blocks[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char context;

static int find(
    Address address) {  // of the block that holds the address; -1 if it is not on the device
  for (int i = 0; i < MOST; ++i)
    if (address >= (Address)blocks[i].base && address < (Address)blocks[i].base + blocks[i].size)
      return i;
  return -1;
}

static void* reach(Address address) {
  int i = find(address);
  return i < 0 ? (void*)address : blocks[i].shadow + (address - (Address)blocks[i].base);
}

int ssdtune_stub_allocate(Address* address,
                          size_t size) {  // never freed: a process lasts for some tests
  int file = memfd_create("device", MFD_CLOEXEC), i = 0;
  if (ftruncate(file, (off_t)size)) return OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  while (i < MOST && blocks[i].size) ++i;
  if (i < MOST) {
    blocks[i].base = mmap(NULL, size, PROT_NONE, MAP_SHARED, file, 0);
    blocks[i].shadow = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    blocks[i].size = size;
    *address = (Address)blocks[i].base;
  }
  pthread_mutex_unlock(&lock);
  close(file);
  return i < MOST ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemcpyAsync(Address to, Address from, size_t size, void* stream) {
  (void)stream;
  memcpy(reach(to), reach(from), size);
  return SUCCESS;
}
int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t size, void* stream) {
  return cuMemcpyAsync(to, (Address)from, size, stream);
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t size, void* stream) {
  return cuMemcpyAsync((Address)to, from, size, stream);
}
int cuMemHostAlloc(void** memory, size_t size, unsigned flags) {
  (void)flags;
  return posix_memalign(memory, 64, size) ? OUT_OF_MEMORY : SUCCESS;  // the driver promises no page
}
int cuMemFreeHost(void* memory) {
  free(memory);
  return SUCCESS;
}

int cuPointerGetAttribute(void* data, int attribute, Address address) {
  int on_device = find(address) >= 0;
  if (attribute == 2) {
    *(unsigned*)data = on_device ? 2 : 0;  // 0: host memory that the driver does not know
    return SUCCESS;
  }
  if (!on_device) return INVALID_VALUE;
  if (attribute == 1) *(void**)data = &context;
  if (attribute == 3) *(Address*)data = address;
  if (attribute == 9) *(int*)data = 0;
  return SUCCESS;
}
int cuPointerGetAttributes(unsigned number, int* attributes, void** data, Address address) {
  for (unsigned i = 0; i < number; ++i)
    if (cuPointerGetAttribute(data[i], attributes[i], address)) *(void**)data[i] = NULL;
  return SUCCESS;
}
int cuMemGetAddressRange_v2(Address* base, size_t* size, Address address) {
  int i = find(address);
  if (i < 0) return INVALID_VALUE;
  if (base) *base = (Address)blocks[i].base;
  if (size) *size = blocks[i].size;
  return SUCCESS;
}

#define GIVES(name, type, value) \
  int name(type* result) {       \
    *result = value;             \
    return SUCCESS;              \
  }
GIVES(cuDriverGetVersion, int, 12040)
GIVES(cuDeviceGetCount, int, 1)
GIVES(cuCtxGetCurrent, void*, &context)
GIVES(cuCtxPopCurrent_v2, void*, &context)
GIVES(cuCtxGetDevice, int, 0)
GIVES(cuDeviceGet, int, 0)
GIVES(cuStreamCreate, void*, &context)
GIVES(cuEventCreate, void*, &context)
GIVES(cuCtxCreate_v2, void*, &context)
GIVES(cuCtxCreate_v4, void*, &context)  // as kvikio for CUDA 13 calls it
GIVES(cuDevicePrimaryCtxRetain, void*, &context)

int cuDeviceTotalMem_v2(size_t* size, int device) {
  (void)device;
  *size = (size_t)1 << 30;
  return SUCCESS;
}
int cuDeviceGetName(char* name, int size, int device) {
  (void)device;
  strncpy(name, "stub of a GPU", (size_t)size);
  return SUCCESS;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)attribute, (void)device;
  *value = 0;
  return SUCCESS;
}
static int text(int error, const char** result) {
  (void)error;
  *result = "error of the stub";
  return SUCCESS;
}
int cuGetErrorName(int error, const char** result) { return text(error, result); }
int cuGetErrorString(int error, const char** result) { return text(error, result); }

#define NOTHING(name) \
  int name(void) { return SUCCESS; }
NOTHING(cuInit)
NOTHING(cuMemHostRegister_v2)
NOTHING(cuMemHostUnregister)
NOTHING(cuCtxDestroy_v2)
NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuDevicePrimaryCtxRelease_v2)
NOTHING(cuStreamSynchronize)
NOTHING(cuStreamDestroy_v2)
NOTHING(cuEventSynchronize)
NOTHING(cuEventDestroy_v2)
NOTHING(cuEventRecord)
NOTHING(cuEventQuery)
NOTHING(cuLaunchHostFunc)
