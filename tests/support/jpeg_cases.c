/* Gives each JPEG of a file to jaxscale_jpeg_box, with pages around what it may touch.
 *
 * The file: of each case a length, the box (top, left, height, width), the channels and
 * how much memory less than promised there is for the pixels, seven int32; then the
 * bytes. libjpeg itself is not built with sanitizers: what it reads or writes next to
 * the stream or the pixels is a page that nobody may touch.
 *
 * Prints how often each code came back.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int jaxscale_jpeg_box(const uint8_t *data, size_t size, const int32_t *box,
                      int channels, uint8_t *out, int32_t *first);

enum { MARGIN = 64 }; /* in front of what ends where its pages do */

static size_t pages(size_t size) { return (size + MARGIN + 4095) / 4096 * 4096; }

/* Memory of a size that ends where a page begins that nobody may touch. */
static uint8_t *fenced(size_t size) {
  size_t own = pages(size);
  uint8_t *start = mmap(NULL, own + 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || mprotect(start + own, 4096, PROT_NONE)) abort();
  memset(start, 0xA5, own);
  return start + own - size;
}

static void unfence(uint8_t *memory, size_t size) {
  for (int i = 1; i <= MARGIN; i++)
    if (memory[-i] != 0xA5) abort(); /* written in front of it */
  munmap(memory + size - pages(size), pages(size) + 4096);
}

int main(int count, char **names) {
  FILE *file = count == 2 ? fopen(names[1], "rb") : NULL;
  int codes[3] = {0, 0, 0};
  int32_t head[7], first;
  if (!file) return 2;
  while (fread(head, sizeof head, 1, file) == 1) {
    int32_t height = head[3], width = head[4], channels = head[5];
    size_t size = head[0], room = 1;
    if (height > 0 && width > 0) room = (size_t)height * (width + 31) * channels;
    room -= head[6];
    uint8_t *data = fenced(size), *out = fenced(room);
    if (fread(data, 1, size, file) != size) return 2;
    codes[jaxscale_jpeg_box(data, size, head + 1, channels, out, &first)]++;
    unfence(data, size);
    unfence(out, room);
  }
  fclose(file);
  printf("%d %d %d\n", codes[0], codes[1], codes[2]);
  return 0;
}
