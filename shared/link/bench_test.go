package link

import (
	"fmt"
	"io"
	"net"
	"testing"
)

// barePair is what the link is measured against: the bare transport.
func barePair(b *testing.B, network string) (c1, c2 net.Conn) {
	ln, err := net.Listen(network, map[string]string{"tcp": "127.0.0.1:0", "unix": b.TempDir() + "/s"}[network])
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	got := make(chan net.Conn)
	go func() {
		nc, _ := ln.Accept()
		got <- nc
	}()
	if c1, err = net.Dial(network, ln.Addr().String()); err != nil {
		b.Fatal(err)
	}
	c2 = <-got
	b.Cleanup(func() { c1.Close(); c2.Close() })
	return c1, c2
}

func benchPair(b *testing.B, kind, network string) (c1, c2 net.Conn) {
	if kind == "bare" {
		return barePair(b, network)
	}
	return newRig(b, network, Options{}).pair(Options{})
}

func each(b *testing.B, f func(b *testing.B, c1, c2 net.Conn)) {
	for _, network := range []string{"tcp", "unix"} {
		for _, kind := range []string{"bare", "link"} {
			b.Run(network+"/"+kind, func(b *testing.B) {
				c1, c2 := benchPair(b, kind, network)
				f(b, c1, c2)
			})
		}
	}
}

// BenchmarkEcho is the round trip of one message of 128 bytes.
func BenchmarkEcho(b *testing.B) {
	each(b, func(b *testing.B, c1, c2 net.Conn) {
		go func() {
			buf := make([]byte, 4096)
			for {
				n, err := c2.Read(buf)
				if err != nil {
					return
				}
				c2.Write(buf[:n])
			}
		}()
		buf := make([]byte, 4096)
		b.ReportAllocs()
		for b.Loop() {
			c1.Write(buf[:128])
			if _, err := io.ReadFull(c1, buf[:128]); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkBulk is one direction, by write size.
func BenchmarkBulk(b *testing.B) {
	for _, size := range []int{32 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size>>10, "K"), func(b *testing.B) {
			each(b, func(b *testing.B, c1, c2 net.Conn) {
				go func() {
					buf := make([]byte, size)
					for {
						if _, err := c1.Write(buf); err != nil {
							return
						}
					}
				}()
				buf := make([]byte, size)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := io.ReadFull(c2, buf); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}
