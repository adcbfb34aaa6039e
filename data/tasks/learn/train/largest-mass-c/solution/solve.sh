sqlite3 c.db 'select max(mass) from t' > answer.txt
