/* Load on one HTTP/1.1 server on 127.0.0.1: a closed loop over keep-alive connections, one thread, one epoll.
 *
 *     load PORT PATH BODY CONNECTIONS SECONDS WARM_UP_SECONDS [CONTENT_TYPE]
 *
 * Every connection posts the same body, waits for the answer, and posts again, for WARM_UP_SECONDS that are not counted
 * and SECONDS that are. BODY is a number of bytes, or @FILE. Then nothing new is sent, and what is under way has GRACE_S to be answered.
 * An answer counts for the window in which it arrived. Prints one JSON object:
 *
 *     answered            answers with status 2xx in the window, and `per_second`; `answered_in_all`: over the whole run
 *     failed              answers with any other status, over the whole run; `last_failure` is the newest such status
 *     lost                requests that got no answer: the connection broke, or the grace was over; the whole run
 *     p50_ms … max_ms     from the first byte sent to the last byte received, of the answers in the window
 *
 * Only answers with a Content-Length are understood; others count as lost. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HEAD = 16 * 1024, MAX_EVENTS = 256, READ_BYTES = 256 * 1024 };
static const double GRACE_S = 5.0;

typedef struct {
    int socket, is_waiting, is_blocked; /* a request is under way; its end waits for room in the socket */
    int closes;                         /* the server said that it closes after this answer */
    size_t sent, head_bytes;
    long long body_left; /* of the answer; -1 while its head is not complete */
    int status;
    double began;
    char head[MAX_HEAD];
} Connection;

static int port, epoll;
static char *request;
static size_t request_bytes;
static double window_begins, window_ends;
static double *latencies;
static size_t answered, answered_in_all, room, failed, lost;
static int under_way, last_failure;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void stop(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void watch(Connection *c, int operation, unsigned events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll, operation, c->socket, &event)) stop("epoll_ctl");
}

static void open_connection(Connection *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    int on = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->socket < 0 || connect(c->socket, (struct sockaddr *)&address, sizeof address)) stop("connect");
    setsockopt(c->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    c->is_waiting = c->is_blocked = 0;
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
}

static void begin_request(Connection *c);

/* The connection is of no more use: a request that was under way on it is lost, a new one takes its place. */
static void give_up(Connection *c) {
    if (c->is_waiting) {
        lost++;
        under_way--;
    }
    close(c->socket);
    open_connection(c);
    if (now() < window_ends) begin_request(c);
}

static void send_rest(Connection *c) {
    while (c->sent < request_bytes) {
        ssize_t n = send(c->socket, request + c->sent, request_bytes - c->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            c->sent += (size_t)n;
        } else if (errno == EAGAIN) {
            if (!c->is_blocked) watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            c->is_blocked = 1;
            return;
        } else {
            return; /* reading will find the connection broken, perhaps after an answer that says why */
        }
    }
    if (c->is_blocked) watch(c, EPOLL_CTL_MOD, EPOLLIN);
    c->is_blocked = 0;
}

static void begin_request(Connection *c) {
    c->is_waiting = 1;
    under_way++;
    c->sent = c->head_bytes = 0;
    c->body_left = -1;
    c->began = now();
    send_rest(c);
}

static void count_answer(Connection *c, double at) {
    if (c->status < 200 || c->status > 299) {
        failed++;
        last_failure = c->status;
        return;
    }
    answered_in_all++;
    if (at < window_begins || at > window_ends) return;
    if (answered == room) {
        room = room ? 2 * room : 1 << 16;
        latencies = realloc(latencies, room * sizeof *latencies);
        if (!latencies) stop("realloc");
    }
    latencies[answered++] = at - c->began;
}

/* Takes `n` bytes of an answer: 1 when it is whole, 0 while it is not, -1 when it cannot be understood. */
static int take(Connection *c, const char *bytes, size_t n) {
    if (c->body_left < 0) {
        size_t copied = n < MAX_HEAD - 1 - c->head_bytes ? n : MAX_HEAD - 1 - c->head_bytes;
        size_t before = c->head_bytes, from_here;
        memcpy(c->head + before, bytes, copied);
        c->head_bytes += copied;
        c->head[c->head_bytes] = 0;
        char *end = memmem(c->head, c->head_bytes, "\r\n\r\n", 4);
        if (!end) return c->head_bytes < MAX_HEAD - 1 ? 0 : -1;
        *end = 0;
        char *length = strcasestr(c->head, "\r\ncontent-length:");
        if (!length || c->head_bytes < 12) return -1;
        c->status = atoi(c->head + 9);
        c->body_left = atoll(length + 17);
        c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
        from_here = (size_t)(end + 4 - c->head) - before;
        n -= from_here;
    }
    if ((long long)n > c->body_left) return -1;
    c->body_left -= (long long)n;
    return c->body_left == 0;
}

static void read_answer(Connection *c) {
    static char buffer[READ_BYTES];
    for (;;) {
        ssize_t n = recv(c->socket, buffer, sizeof buffer, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0 || !c->is_waiting) {
            give_up(c);
            return;
        }
        int whole = take(c, buffer, (size_t)n);
        if (whole < 0) {
            give_up(c);
            return;
        }
        if (whole) {
            double at = now();
            count_answer(c, at);
            c->is_waiting = 0;
            under_way--;
            if (c->closes) give_up(c);
            else if (at < window_ends) begin_request(c);
            return;
        }
        if ((size_t)n < sizeof buffer) return;
    }
}

static int compare(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double percentile_ms(double share) {
    return answered ? latencies[(size_t)(share * (double)(answered - 1))] * 1e3 : -1;
}

int main(int count, char **words) {
    if (count != 7 && count != 8) {
        fprintf(stderr, "usage: load PORT PATH BODY CONNECTIONS SECONDS WARM_UP_SECONDS [CONTENT_TYPE]\n");
        return 2;
    }
    port = atoi(words[1]);
    FILE *file = NULL;
    size_t body_bytes = (size_t)atoll(words[3]), connections = (size_t)atoll(words[4]);
    if (words[3][0] == '@') {
        file = fopen(words[3] + 1, "rb");
        if (!file || fseek(file, 0, SEEK_END)) stop(words[3] + 1);
        body_bytes = (size_t)ftell(file);
        rewind(file);
    }
    double seconds = atof(words[5]);
    const char *type = count == 8 ? words[7] : "application/octet-stream";
    request = malloc(strlen(words[2]) + strlen(type) + 256 + body_bytes);
    Connection *all = calloc(connections, sizeof *all);
    if (!request || !all) stop("malloc");
    request_bytes = (size_t)sprintf(request,
                                    "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: %s\r\n"
                                    "Content-Length: %zu\r\n\r\n",
                                    words[2], port, type, body_bytes);
    if (file) {
        if (fread(request + request_bytes, 1, body_bytes, file) != body_bytes) stop(words[3] + 1);
        fclose(file);
        request_bytes += body_bytes;
    } else {
        for (size_t i = 0; i < body_bytes; i++) request[request_bytes++] = (char)('a' + i % 23);
    }
    epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0) stop("epoll_create1");
    for (size_t i = 0; i < connections; i++) open_connection(&all[i]);
    window_begins = now() + atof(words[6]);
    window_ends = window_begins + seconds;
    for (size_t i = 0; i < connections; i++) begin_request(&all[i]);

    struct epoll_event events[MAX_EVENTS];
    while (now() < window_ends || (under_way && now() < window_ends + GRACE_S)) {
        int n = epoll_wait(epoll, events, MAX_EVENTS, 20);
        if (n < 0 && errno != EINTR) stop("epoll_wait");
        for (int i = 0; i < n; i++) {
            Connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) send_rest(c);
            if (events[i].events & ~(unsigned)EPOLLOUT) read_answer(c);
        }
    }
    lost += (size_t)under_way;

    if (answered) qsort(latencies, answered, sizeof *latencies, compare);
    printf("{\"answered\": %zu, \"answered_in_all\": %zu, \"per_second\": %.1f, \"failed\": %zu, \"last_failure\": %d, \"lost\": %zu, "
           "\"p50_ms\": %.4f, \"p90_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f}\n",
           answered, answered_in_all, (double)answered / seconds, failed, last_failure, lost, percentile_ms(0.5), percentile_ms(0.9),
           percentile_ms(0.99), percentile_ms(1.0));
    return 0;
}
