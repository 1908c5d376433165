package wsframe

import (
	"fmt"
	"io"
	"math"
	"net"
	"testing"
)

// tcpPair is a loopback connection.
func tcpPair(b testing.TB) (near, far net.Conn) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	if near, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		b.Fatal(err)
	}
	if far, err = ln.Accept(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

// relays are what Pipe is measured against: io.Copy, which knows no frames and
// here does not splice, as the link's connections cannot.
var relays = map[string]func(dst, src net.Conn){
	"copy": func(dst, src net.Conn) { io.Copy(struct{ io.Writer }{dst}, struct{ io.Reader }{src}) },
	"pipe": func(dst, src net.Conn) { NewPipe(dst, src, nil).Run() },
}

// BenchmarkRelay sends messages of a size through one relay between two
// loopback connections. One message at a time is latency, many are throughput.
func BenchmarkRelay(b *testing.B) {
	for _, size := range []int{128, 16 << 10, 1 << 20} {
		for _, name := range []string{"copy", "pipe"} {
			b.Run(fmt.Sprintf("%d/%s", size, name), func(b *testing.B) {
				in, src := tcpPair(b)
				dst, out := tcpPair(b)
				go relays[name](dst, src)
				msg := frame(0x82, uint64(size), true, make([]byte, size))
				got := make([]byte, len(msg))
				b.SetBytes(int64(len(msg)))
				b.ReportAllocs()
				for b.Loop() {
					go in.Write(msg)
					if _, err := io.ReadFull(out, got); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkScan is what knowing the frames costs, without any I/O.
func BenchmarkScan(b *testing.B) {
	for _, size := range []int{128, 16 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			var in []byte
			for len(in) < 64<<10 {
				in = append(in, frame(0x82, uint64(size), true, make([]byte, size))...)
			}
			p := NewPipe(io.Discard, nil, nil)
			b.SetBytes(int64(len(in)))
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := p.scan(in); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestRelayAllocates nothing per message.
func TestRelayAllocatesNothing(t *testing.T) {
	msg := frame(0x82, 300, true, make([]byte, 300))
	left := 10000
	src := readerFunc(func(p []byte) (int, error) {
		if left--; left < 0 {
			return 0, io.EOF
		}
		return copy(p, msg), nil
	})
	allocs := math.Inf(1)
	for tries := 0; tries < 5 && allocs > 20; tries++ { // what else the program allocates meanwhile is counted too
		allocs = testing.AllocsPerRun(3, func() {
			left = 10000
			if err := NewPipe(io.Discard, src, func(byte, []byte) {}).Run(); err != nil {
				t.Fatal(err)
			}
		})
	}
	if allocs > 20 {
		t.Fatalf("%v allocations for 10000 messages", allocs)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
