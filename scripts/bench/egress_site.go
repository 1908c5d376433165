package main

import "net"

// echoPorts: connections to one address and port that ended leave their own
// ports unused for a minute, of which a computer has some 28,000.
const echoPorts = 16

// serveSite listens on free ports of the bench's own address.
func serveSite(ports int, serve func(net.Conn)) (addrs []string, err error) {
	for range ports {
		ln, err := net.Listen("tcp4", webAddr+":0")
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, ln.Addr().String())
		go func() {
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				go func() { defer conn.Close(); serve(conn) }()
			}
		}()
	}
	return addrs, nil
}

// pour answers the first bytes with an endless body; a browser would take it for
// HTTP/0.9.
func pour(conn net.Conn) {
	chunk := make([]byte, 256<<10)
	if _, err := conn.Read(chunk); err != nil {
		return
	}
	for {
		if _, err := conn.Write(chunk); err != nil {
			return
		}
	}
}

// repeat sends back what comes, in small pieces.
func repeat(conn net.Conn) {
	b := make([]byte, 64)
	for {
		n, err := conn.Read(b)
		if err != nil {
			return
		}
		if _, err := conn.Write(b[:n]); err != nil {
			return
		}
	}
}
